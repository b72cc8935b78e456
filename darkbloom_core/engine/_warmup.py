"""What runs before a model serves: every kind of step once, and the choices that only this device can make.

On CUDA the first use of a kernel's shape takes long, so each decode batch size and the
prefill chunk run here. Choices between ways that give the same tokens are made by the
median time of a few steps, the least of some rounds, on scratch rows that are closed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
import numpy as np

from darkbloom_core.contracts import LoadedModel, VisionSeam
from darkbloom_core.engine._chunk import ChunkBatch
from darkbloom_core.engine._compiled import CompiledDecode, run_decode
from darkbloom_core.engine._decode import decode_shape, layer_arrays
from darkbloom_core.engine._kv import KvStore, Row
from darkbloom_core.engine._pack import PackBatch, can_pack, last_positions
from darkbloom_core.engine._request import SamplingParams
from darkbloom_core.engine._sampling import SampledRow, Sampler, token_mask
from darkbloom_core.errors import SetupError

TIMED_STEPS = 7
PACKED_PROMPTS = 4
PACKED_TOKENS = 32
REPEATS = 4
BLANK_PIXELS = 1024
REPEAT_TOLERANCE = 0.05
"""How often a chunk is run again on an accelerator, and how far its logits may be from the first run's."""

MOST_ROUNDS = 12
ROUNDS_SECONDS = 0.3
"""Ways to choose from take turns, so many times, or as often as fits in about so long, but once at least."""

WORTH_CHANGING = 0.95
"""Another way than the plain one must take at most this share of its time to be chosen.

On CUDA the plain way of a decode step is to replay a graph, elsewhere to build it anew: what a step takes
on CUDA swings with what else the host does, and a graph leaves the host the least to do.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What was chosen for this model on this device, and the measured seconds of a prefill layer per chunk.

    ``tower_layer_seconds`` is the same of a layer of the tower, for its largest picture.

    ``compiled`` holds for decode steps of several rows, ``compiled_alone`` for those of one;
    ``unfused``: their operations are replayed one by one.
    ``chained``: a decode step is launched while the one before runs, else after it.
    ``packed``: short prompts run together. ``fixed_size``: the batch size of deterministic
    mode, None in the default mode. ``activation_bytes``: the most that was allocated over
    what the model and its slabs hold, while the largest chunk and the decode batches ran.
    """

    compiled: bool = False
    compiled_alone: bool = False
    unfused: bool = False
    chained: bool = False
    packed: bool = False
    fixed_size: int | None = None
    layer_seconds: float | None = None
    tower_layer_seconds: float | None = None
    activation_bytes: int = 0

    def compiles(self, rows: int) -> bool:
        """Whether decode steps of so many rows may be compiled."""
        return self.compiled if rows > 1 else self.compiled_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What warm-up may choose; None leaves it to the measurement. ``unfused`` is how it compiles."""

    compiled: bool | None = False
    unfused: bool = False
    chained: bool | None = None
    packed: bool | None = None


def warm_up(
    model: LoadedModel, store: KvStore, grid: int, rows: int, allowed: Allowed, *, on_cpu: bool
) -> Choices:
    """Run every kind of step of ``store``'s model once and choose; ``rows`` is the largest decode batch.

    The CPU backend has no kernels to compile, so there only what is measured is run.
    """
    limit = min(grid, model.description.context_tokens) + 64
    mx.reset_peak_memory()
    resident = mx.get_active_memory()
    chunk = _time(lambda: _prefill(model, store, grid, limit), 1, first=not on_cpu)
    if not on_cpu:
        for tokens in batch_sizes(grid):  # a prompt's last chunk is of any length
            _prefill(model, store, tokens, limit)
        _check_repeats(lambda: _prefill(model, store, grid, limit))
        for size in batch_sizes(rows):
            _steps(model, store, size, compiled=None, chained=False)
        _rarer_kernels(model, store, rows)
    tower = None if model.vision is None else _look(model, model.vision, store, grid, first=not on_cpu)
    activations = max(0, mx.get_peak_memory() - resident)
    graphs = CompiledDecode(model, unfused=allowed.unfused)
    compiled = compiled_alone = _choose_compiled(model, store, 1, graphs, allowed.compiled)
    if rows > 1:
        # Without the kernel a shape ends when any of its rows has 64 tokens more, which rows in step do not show.
        unseen = on_cpu and allowed.compiled is None and not store.has_kernel
        compiled = _choose_compiled(model, store, rows, graphs, False if unseen else allowed.compiled)
    if store.has_kernel:
        _beside_the_slab(model, store, graphs if compiled or compiled_alone else None)
    return Choices(
        compiled=compiled,
        compiled_alone=compiled_alone,
        unfused=allowed.unfused,
        chained=_choose_chained(model, store, rows, allowed.chained),
        packed=_choose_packed(model, store, rows, allowed.packed),
        layer_seconds=chunk / len(store.layers),
        tower_layer_seconds=tower,
        activation_bytes=activations,
    )


def batch_sizes(rows: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``rows`` itself."""
    sizes = [1]
    while sizes[-1] * 2 < rows:
        sizes.append(sizes[-1] * 2)
    return (*sizes, rows) if rows > 1 else (1,)


def _rarer_kernels(model: LoadedModel, store: KvStore, rows: int) -> None:
    """What not every step runs: lanes with a hole between them, a pack of uneven prompts, every way to sample."""
    if rows >= 3:
        steps = _Steps(model, store, 3, None)
        steps.leave(1)
        steps.run(2, chained=False)
        steps.close()
    if rows >= 2 and can_pack(store.layers):
        _pack(model, store, 2, shorter=1)
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1, logprobs=2, logit_bias={0: 1.0},
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    )  # fmt: skip
    vocabulary = model.description.vocab_size
    asked = (params, replace(params, top_k=0, top_p=1.0, min_p=0.0), SamplingParams(temperature=0.0))
    for some in (asked, asked[1:]):
        drawn = [SampledRow(one, 1, 0, (0,), [0]) for one in some]
        sampler = Sampler(drawn, vocabulary, mx.zeros((len(some),), mx.int32))
        logits, steps_done = mx.zeros((len(some), vocabulary)), [0] * len(some)
        mask = token_mask([bytes([255]) * (vocabulary // 8 + 1), *[None] * (len(some) - 1)], vocabulary)
        mx.eval(*(sampler.sample(logits, steps_done, allowed) for allowed in (mask, None)))


def _beside_the_slab(model: LoadedModel, store: KvStore, compiled: CompiledDecode | None) -> None:
    """A row with buffers of its own. It attends with MLX's kernels, which rows of the slab have not used."""
    for way in {None, compiled}:
        steps = _Steps(model, store, 1, way, prompt_tokens=store.shared_tokens)
        steps.run(2, chained=False)
        steps.close()


def _check_repeats(prefill: Callable[[], mx.array]) -> None:
    """Raise ``SetupError`` if the same chunk gives clearly different logits when it is run again."""
    first = prefill().astype(mx.float32)
    scale = _largest(first)
    for _ in range(REPEATS):
        difference = _largest(prefill().astype(mx.float32) - first)
        if not difference <= REPEAT_TOLERANCE * scale:
            raise SetupError(
                "this device gives different results for the same computation "
                f"(logits differ by {difference:.3g} of {scale:.3g}); on CUDA set MLX_USE_CUDA_GRAPHS=0"
            )


def _largest(array: mx.array) -> float:
    return cast(float, mx.max(mx.abs(array)).item())


def _prefill(model: LoadedModel, store: KvStore, tokens: int, limit: int) -> mx.array:
    row = store.open_row(tokens, limit)
    batch = ChunkBatch(store, row, 0, tokens)
    inputs = model.run_layers(model.embed(mx.zeros((1, tokens), mx.int32)), batch, 0, len(store.layers))
    logits = model.logits(inputs[0][:, -1:])
    mx.eval(logits, batch.written(0, len(store.layers)))
    store.close_row(row)
    return logits


def _look(model: LoadedModel, vision: VisionSeam, store: KvStore, grid: int, *, first: bool) -> float:
    """Seconds of a layer of the tower; a picture that is longer than a chunk makes a longer one, which runs, too."""
    picture = vision.prepare(np.zeros((BLANK_PIXELS, BLANK_PIXELS, 3), np.uint8), video=False)
    layers = vision.tower_layers

    def look() -> None:
        mx.eval(vision.finish(vision.run_layers(vision.start(picture), 0, layers)))

    seconds = _time(look, 1, first=first) / max(1, layers)
    if grid < vision.most_soft_tokens < model.description.context_tokens:
        _prefill(model, store, vision.most_soft_tokens, vision.most_soft_tokens + 1)
    return seconds


class _Steps:
    """A few greedy decode steps of scratch rows, in one of the ways to choose from.

    Rows are stored as those of ``prompt_tokens`` are.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: KvStore,
        count: int,
        compiled: CompiledDecode | None,
        prompt_tokens: int = 1,
    ) -> None:
        self._model = model
        self._store = store
        self._compiled = compiled
        self._rows: list[Row] = [store.open_row(prompt_tokens, TIMED_STEPS * 4) for _ in range(count)]
        self._position = 0
        self._tokens = mx.zeros((count,), mx.int32)

    def run(self, steps: int, *, chained: bool) -> float:
        """Median seconds of a step."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            following = mx.argmax(self._logits(), axis=-1).astype(mx.int32)
            if not chained:
                mx.eval(self._tokens)
            mx.async_eval(following)  # type: ignore[no-untyped-call]  # MLX's stub has no types here
            mx.eval(self._tokens)
            self._tokens = following
            self._position += 1
            times.append(time.perf_counter() - began)
        mx.eval(self._tokens)
        return statistics.median(times)

    def leave(self, index: int) -> None:
        """Row ``index`` ends; its lane stays empty. Before the first step."""
        self._store.close_row(self._rows.pop(index))
        self._tokens = self._tokens[: len(self._rows)]

    def close(self) -> None:
        for row in self._rows:
            self._store.close_row(row)

    def _logits(self) -> mx.array:
        positions = [self._position] * len(self._rows)
        offsets = mx.array(positions, mx.int32)
        arrays = layer_arrays(self._store, self._rows)
        shape = decode_shape(self._store, self._rows, positions, exact=self._compiled is None)
        if self._compiled is not None:
            return self._compiled.run(shape, self._tokens, offsets, arrays)
        return run_decode(self._model, shape, self._tokens, offsets, arrays)


def _steps(
    model: LoadedModel, store: KvStore, rows: int, *, compiled: CompiledDecode | None, chained: bool
) -> float:
    steps = _Steps(model, store, rows, compiled)
    try:
        steps.run(2, chained=chained)
        return steps.run(TIMED_STEPS, chained=chained)
    finally:
        steps.close()


def _choose_compiled(
    model: LoadedModel, store: KvStore, size: int, compiled: CompiledDecode, allowed: bool | None
) -> bool:
    if allowed is False:
        return False

    def run(way: CompiledDecode | None) -> float:
        return _steps(model, store, size, compiled=way, chained=False)

    if allowed:
        run(compiled)
        run(None)  # a shape that comes once is not compiled
        return True
    replayed, eager = _best(lambda: run(compiled), lambda: run(None))
    if mx.cuda.is_available():
        return eager > WORTH_CHANGING * replayed
    return replayed <= WORTH_CHANGING * eager


def _choose_chained(model: LoadedModel, store: KvStore, rows: int, allowed: bool | None) -> bool:
    if allowed is not None:
        return allowed
    peaks: dict[bool, int] = {}

    def run(chained: bool) -> float:
        mx.reset_peak_memory()
        seconds = sum(_steps(model, store, size, compiled=None, chained=chained) for size in {1, rows})
        peaks[chained] = max(peaks.get(chained, 0), mx.get_peak_memory())
        return seconds

    chained, plain = _best(lambda: run(True), lambda: run(False))
    copies_kv = peaks[True] - peaks[False] > store.slab_bytes // (4 * len(store.layers))
    return not copies_kv and chained <= WORTH_CHANGING * plain


def _choose_packed(model: LoadedModel, store: KvStore, rows: int, allowed: bool | None) -> bool:
    if not can_pack(store.layers) or rows < 2 or allowed is False:
        return False
    count = min(PACKED_PROMPTS, rows)
    if allowed:
        _pack(model, store, count)
        return True
    together, alone = _best(
        lambda: _time(lambda: _pack(model, store, count), 2),
        lambda: _time(lambda: _prefill(model, store, PACKED_TOKENS, PACKED_TOKENS + 1), 2),
    )
    return together <= WORTH_CHANGING * count * alone


def _pack(model: LoadedModel, store: KvStore, count: int, shorter: int = 0) -> None:
    """``count`` prompts at once, the last of them ``shorter`` than the others."""
    lengths = [*[PACKED_TOKENS] * (count - 1), PACKED_TOKENS - shorter]
    rows = [store.open_row(length, PACKED_TOKENS + 1) for length in lengths]
    batch = PackBatch(store, rows, lengths)
    ids = mx.zeros((count, PACKED_TOKENS), mx.int32)
    (hidden, *_) = model.run_layers(model.embed(ids), batch, 0, len(store.layers))
    last = last_positions(hidden, range(count), lengths)
    mx.eval(model.logits(last), batch.written(0, len(store.layers)))
    for row in rows:
        store.close_row(row)


def _best(*ways: Callable[[], float]) -> list[float]:
    """The least seconds that each way gives, in rounds in which they take turns: who else runs slows some of these."""
    best = [way() for way in ways]
    began = time.perf_counter()  # the first round may have compiled
    for _ in range(MOST_ROUNDS - 1):
        if TIMED_STEPS * sum(best) > ROUNDS_SECONDS or time.perf_counter() - began > ROUNDS_SECONDS:
            break
        best = [min(known, way()) for known, way in zip(best, ways, strict=True)]
    return best


def _time(run: Callable[[], object], repeats: int, *, first: bool = True) -> float:
    """Median seconds of ``repeats`` runs, after a ``first`` one that is not counted."""
    if first:
        run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
