"""Builds and launches steps of one model. Lives on the engine's thread and owns every MLX object of the model.

Always true: at most one launched piece of work is unfinished when the next is launched
(so no KV buffer is read and written at once, and none is copied); a decode step is built
on tokens that were not read yet; one host sync per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from darkbloom_core.contracts import FinishReason, LoadedModel
from darkbloom_core.engine._chunk import ChunkBatch
from darkbloom_core.engine._compiled import CompiledDecode, run_decode
from darkbloom_core.engine._decode import decode_shape, layer_arrays
from darkbloom_core.engine._kv import KvStore, Row
from darkbloom_core.engine._live import Launched, Live
from darkbloom_core.engine._sampling import Sampler
from darkbloom_core.engine._scheduler import ChunkSlice

SMOOTHING = 0.3


class StepFault(Exception):  # a fault, as the rest of the engine calls it
    """A step could not be built or finished; ``members`` are the sequences that cannot go on."""

    def __init__(self, members: tuple[Live, ...], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.members = members


class Runner:
    """``on_finish`` is called with a sequence whose last token was read, ``on_fault`` with one whose text broke."""

    def __init__(
        self,
        model: LoadedModel,
        store: KvStore,
        on_finish: Callable[[Live, FinishReason], None],
        on_fault: Callable[[Live, Exception], None],
    ) -> None:
        self._model = model
        self._store = store
        self._on_finish = on_finish
        self._on_fault = on_fault
        self._layers = len(model.description.layers)
        self._inflight: Launched | None = None
        self.compiled: CompiledDecode | None = CompiledDecode(model)
        self._sampler: tuple[tuple[Live, ...], Sampler] | None = None
        self._decoded: tuple[tuple[Live, ...], mx.array] | None = None
        self.layer_seconds: float | None = None
        self.decode_steps = 0
        self.prefill_tokens = 0
        self.output_tokens = 0
        self.largest_batch = 0

    def decode(self, lives: tuple[Live, ...]) -> None:
        """Launch one token for each of ``lives``, which are in ascending order of lane. Raises ``StepFault``."""
        try:
            work = self._build_decode(lives)
        except Exception as fault:
            raise StepFault(lives, fault) from fault
        self._launch(work)

    def prefill(self, live: Live, piece: ChunkSlice) -> None:
        """Launch one slice of layers of one chunk; with the prompt's last slice comes the first token.

        Raises ``StepFault``.
        """
        try:
            work = self._build_prefill(live, piece)
        except Exception as fault:
            raise StepFault((live,), fault) from fault
        self._launch(work)

    def settle(self) -> None:
        """Wait for what was launched, and read it. Raises ``StepFault``."""
        self._launch(None)

    @property
    def is_idle(self) -> bool:
        return self._inflight is None

    def _build_decode(self, lives: tuple[Live, ...]) -> Launched:
        rows = [_row(live) for live in lives]
        positions = [live.sequence.prompt_tokens + live.sequence.launched - 1 for live in lives]
        previous = self._previous_tokens(lives)
        logits = self._decode_logits(rows, positions, previous)
        sampler = self._sampler_for(lives, previous)
        tokens, logprobs = sampler.sample(logits, [live.sequence.launched for live in lives])
        for index, live in enumerate(lives):
            live.last_token = (tokens, index)
            live.sequence.launched += 1
        self._decoded = (lives, tokens)
        self.decode_steps += 1
        self.largest_batch = max(self.largest_batch, len(lives))
        return Launched(
            [tokens, *logprobs, *(one for states in self._store.states for one in states)],
            lives,
            lambda _: self._read(lives, sampler, tokens, logprobs),
        )

    def _build_prefill(self, live: Live, piece: ChunkSlice) -> Launched:
        if piece.first_layer == 0:
            ids = live.request.prompt.ids[piece.start : piece.end]
            live.chunk = ChunkBatch(self._store, _row(live), piece.start, len(ids))
            live.inputs = self._model.embed(mx.array([ids], mx.int32))
        assert live.chunk is not None
        batch = live.chunk
        live.inputs = self._model.run_layers(live.inputs, batch, piece.first_layer, piece.last_layer)
        layers = piece.last_layer - piece.first_layer
        touched = batch.touched(piece.first_layer, piece.last_layer)
        if piece.last_layer < self._layers:
            return Launched([*live.inputs, *touched], (live,), lambda spent: self._timed(spent / layers))
        hidden, live.chunk, live.inputs = live.inputs[0], None, ()
        live.sequence.prefilled = piece.end
        self.prefill_tokens += piece.end - piece.start
        if live.sequence.is_prefilling:
            return Launched([hidden, *touched], (live,), lambda spent: self._timed(spent / layers))
        sampler = Sampler([live.sampled], self._model.description.vocab_size, None)
        tokens, logprobs = sampler.sample(self._model.logits(hidden[:, -1:]), [0])
        live.last_token = (tokens, 0)
        live.sequence.launched = 1
        return Launched(
            [tokens, *logprobs, *touched],
            (live,),
            lambda _: self._read((live,), sampler, tokens, logprobs),
        )

    def _decode_logits(self, rows: list[Row], positions: list[int], tokens: mx.array) -> mx.array:
        for row, position in zip(rows, positions, strict=True):
            self._store.make_room(row, position + 1)
        offsets = mx.array(positions, mx.int32)
        arrays = layer_arrays(self._store, rows)
        if self.compiled is not None:
            shape = decode_shape(self._store, rows, positions, exact=False)
            if self.compiled.is_worth_it(shape):
                return self.compiled.run(shape, tokens, offsets, arrays)
        shape = decode_shape(self._store, rows, positions, exact=True)
        return run_decode(self._model, shape, tokens, offsets, arrays)

    def _launch(self, work: Launched | None) -> None:
        previous, self._inflight = self._inflight, None
        try:
            if previous is not None:
                mx.eval(previous.arrays)
            finished_at = time.monotonic()
            if work is not None:
                mx.async_eval(work.arrays)  # type: ignore[no-untyped-call]  # MLX's stub has no types here
                work.launched_at = time.monotonic()
        except Exception as fault:
            members = [*(previous.members if previous else ()), *(work.members if work else ())]
            raise StepFault(tuple(members), fault) from fault
        self._inflight = work
        if previous is not None:
            previous.complete(finished_at - previous.launched_at)

    def _read(
        self, lives: tuple[Live, ...], sampler: Sampler, tokens: mx.array, logprobs: tuple[mx.array, ...]
    ) -> None:
        values = cast("list[int]", tokens.tolist())
        arrays = tuple(cast("list[Any]", array.tolist()) for array in logprobs)
        for index, (live, token) in enumerate(zip(lives, values, strict=True)):
            if live.ended:
                continue  # it stopped a step ago: this token was launched before that was known
            self.output_tokens += 1
            found = sampler.read_logprobs(index, token, arrays)
            try:
                reason = live.take_token(token, self._model.stop_ids, found)
            except Exception as fault:  # a parser that raises must not end its neighbours
                self._on_fault(live, fault)
                continue
            if reason is not None:
                self._on_finish(live, reason)

    def _previous_tokens(self, lives: tuple[Live, ...]) -> mx.array:
        """``[B]`` int32: each row's last launched token, read or not."""
        if self._decoded is not None and self._decoded[0] == lives:
            return self._decoded[1]
        pieces = []
        for live in lives:
            assert live.last_token is not None
            array, index = live.last_token
            pieces.append(array[index : index + 1])
        return mx.concatenate(pieces)

    def _sampler_for(self, lives: tuple[Live, ...], previous: mx.array) -> Sampler:
        if self._sampler is not None and self._sampler[0] == lives:
            return self._sampler[1]
        for live in lives:
            live.sampled.tokens = live.tokens[: live.sequence.launched - 1]
        sampler = Sampler([live.sampled for live in lives], self._model.description.vocab_size, previous)
        self._sampler = (lives, sampler)
        return sampler

    def _timed(self, seconds_per_layer: float) -> None:
        last = self.layer_seconds
        self.layer_seconds = (
            seconds_per_layer if last is None else last + SMOOTHING * (seconds_per_layer - last)
        )


def _row(live: Live) -> Row:
    assert live.row is not None
    return live.row
