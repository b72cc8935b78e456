"""Builds and launches steps of one model. Lives on the engine's thread and owns every MLX object of the model.

Always true: a decode step is built on tokens that were not read yet, and there is one
host sync per launched piece of work: a decode step, a slice, one part of a layer. If what
may follow in a row depends on its tokens, the model still runs on unread tokens, and only
the choice of the next ones waits until they are read. Unless steps are chained, at most
one launched piece of work is unfinished when the next is launched, so no KV buffer is read
and written at once, and none is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from darkbloom_core.contracts import FinishReason, Inputs, LoadedModel, MediaEmbeddings, MediaSpan
from darkbloom_core.engine._chunk import ChunkBatch
from darkbloom_core.engine._compiled import CompiledDecode, run_decode
from darkbloom_core.engine._decode import decode_shape, layer_arrays
from darkbloom_core.engine._fixed import run_fixed
from darkbloom_core.engine._kv import KvStore, Row
from darkbloom_core.engine._live import Launched, Live
from darkbloom_core.engine._pack import PackBatch, last_positions
from darkbloom_core.engine._pictures import PictureCache
from darkbloom_core.engine._rates import LayerSeconds, PartSeconds
from darkbloom_core.engine._reuse import Capture, Reuse
from darkbloom_core.engine._sampling import Sampler, token_mask
from darkbloom_core.engine._scheduler import SMALL_PICTURE, ChunkSlice, TowerSlice
from darkbloom_core.engine._stream import wake_readers
from darkbloom_core.engine._warmup import Choices


@dataclass(slots=True)
class _Clock:
    """The seconds that the slices of one chunk have taken."""

    seconds: float = 0.0


@dataclass(slots=True)
class _Part:
    """Tokens that go through a layer together, and what their next layer gets."""

    batch: ChunkBatch | PackBatch
    inputs: Inputs


@dataclass(slots=True)
class _Chunk:
    """A chunk, in one or several parts, or a pack on its way. It goes with its last slice."""

    parts: list[_Part]
    clock: _Clock


class StepFault(Exception):  # a fault, as the rest of the engine calls it
    """A step could not be built or finished; ``members`` are the sequences that cannot go on."""

    def __init__(self, members: tuple[Live, ...], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.members = members


class Runner:
    """``on_finish`` is called with a sequence whose last token was read, ``on_fault`` with one whose text broke.

    ``grid`` is the chunk size. ``reuse`` is given what prefill computes, if anybody may want it again.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: KvStore,
        choices: Choices,
        on_finish: Callable[[Live, FinishReason], None],
        on_fault: Callable[[Live, Exception], None],
        grid: int,
        reuse: Reuse | None = None,
        pictures: PictureCache | None = None,
    ) -> None:
        self._model = model
        self._reuse = reuse
        self._pictures = pictures
        self._looking: tuple[Live, tuple[mx.array, ...]] | None = None
        self._store = store
        self._choices = choices
        self._on_finish = on_finish
        self._on_fault = on_fault
        self._layers = len(model.description.layers)
        self._inflight: Launched | None = None
        self._prefilling: _Chunk | None = None
        self._sampler: tuple[tuple[Live, ...], Sampler] | None = None
        self._decoded: tuple[tuple[Live, ...], mx.array] | None = None
        compiles = choices.compiled or choices.compiled_alone
        self.compiled = CompiledDecode(model, unfused=choices.unfused) if compiles else None
        largest = 1 if model.vision is None else model.vision.most_soft_tokens
        self.layer_seconds = LayerSeconds(grid, grid, choices.layer_seconds)
        self.tower_layer_seconds = LayerSeconds(
            largest, largest // SMALL_PICTURE, choices.tower_layer_seconds
        )
        self.part_seconds = PartSeconds()
        self.decode_steps = 0
        self.prefill_tokens = 0
        self.output_tokens = 0
        self.first_tokens = 0
        self.largest_batch = 0

    def decode(self, lives: tuple[Live, ...]) -> None:
        """Launch one token for each of ``lives``, which are in ascending order of lane. Raises ``StepFault``."""
        constrained = any(live.constraint is not None for live in lives)
        try:
            previous = self._previous_tokens(lives)
            work = (self._build_forward if constrained else self._build_decode)(lives, previous)
        except Exception as fault:
            raise StepFault(lives, fault) from fault
        self._launch(work)
        if constrained:
            self._choose_constrained(lives, previous, *work.arrays, chains=work.chains)

    def prefill(self, lives: tuple[Live, ...], piece: ChunkSlice) -> None:
        """Launch one slice of layers of one chunk or pack; with the last slice of a prompt comes its first token.

        Parts are launched one after the other, for each reads what the one before has written.
        Raises ``StepFault``.
        """
        for one in piece.pieces():
            try:
                work = self._build_prefill(lives, one)
            except Exception as fault:
                self._prefilling = None
                raise StepFault(lives, fault) from fault
            self._launch(work)

    def look(self, live: Live, piece: TowerSlice) -> None:
        """Launch one slice of the tower's layers for one picture. Raises ``StepFault``."""
        try:
            work = self._build_look(live, piece)
        except Exception as fault:
            self._looking = None
            raise StepFault((live,), fault) from fault
        self._launch(work)

    def settle(self) -> None:
        """Wait for what was launched, and read it. Raises ``StepFault``."""
        self._sampler = self._decoded = None  # an engine that rests holds nothing of anybody
        self._launch(None)

    def forget(self, row: Row) -> None:
        """``row``'s sequence has ended: store nothing more for it."""
        if self._looking is not None and self._looking[0].row is row:
            self._looking = None
        batch = self._prefilling.parts[0].batch if self._prefilling is not None else None
        if isinstance(batch, PackBatch):
            if row in batch.rows:
                batch.drop(row)
            if batch.is_empty:
                self._prefilling = None
        elif batch is not None and batch.row is row:
            self._prefilling = None

    def close(self) -> None:
        """Let go of all that was launched and of whoever is told: nothing here keeps weights alive any more."""
        self._inflight = self._prefilling = self._sampler = self._decoded = self._looking = None
        self._on_finish = lambda _live, _reason: None
        self._on_fault = lambda _live, _fault: None

    @property
    def is_idle(self) -> bool:
        return self._inflight is None

    # --- decode -------------------------------------------------------------------

    def _build_decode(self, lives: tuple[Live, ...], previous: mx.array) -> Launched:
        logits, chains = self._next_logits(lives, previous)
        return self._choose(lives, logits, self._sampler_for(lives, previous), None, chains=chains)

    def _build_forward(self, lives: tuple[Live, ...], previous: mx.array) -> Launched:
        """Only the model's part of a decode step."""
        logits, chains = self._next_logits(lives, previous)
        return Launched([logits], lives, lambda _: None, chains=chains)

    def _choose_constrained(
        self, lives: tuple[Live, ...], previous: mx.array, logits: mx.array, *, chains: bool
    ) -> None:
        """Choose tokens while the model runs: what may follow depends on the tokens before, which are read by now.

        Reading them may have ended some of ``lives``.
        """
        try:
            sampler = self._sampler_for(lives, previous)
            work = self._choose(lives, logits, sampler, self._allowed(lives), chains=chains)
            mx.async_eval(work.arrays)  # type: ignore[no-untyped-call]  # MLX's stub has no types here
        except Exception as fault:
            raise StepFault(lives, fault) from fault
        self._inflight = work

    def _next_logits(self, lives: tuple[Live, ...], previous: mx.array) -> tuple[mx.array, bool]:
        """``[B, V]``, and whether the next step may be launched while this one runs."""
        rows = [_row(live) for live in lives]
        positions = [live.sequence.prompt_tokens + live.sequence.launched - 1 for live in lives]
        return self._decode_logits(rows, positions, previous), all(row.is_shared for row in rows)

    def _choose(
        self,
        lives: tuple[Live, ...],
        logits: mx.array,
        sampler: Sampler,
        allowed: mx.array | None,
        *,
        chains: bool,
    ) -> Launched:
        steps = [live.sequence.launched for live in lives]
        tokens, logprobs = sampler.sample(logits, steps, allowed)
        for index, live in enumerate(lives):
            live.last_token = None if live.ended else (tokens, index)
            live.sequence.launched += 1
        self._decoded = (lives, tokens)
        self.decode_steps += 1
        self.largest_batch = max(self.largest_batch, len(lives))
        if self._reuse is not None and self._reuse.follows_decoding:
            captures = self._decoded_captures(lives, self._reuse)
            if captures:
                return self._choice_with(captures, lives, sampler, tokens, logprobs)
        return Launched(
            [tokens, *logprobs],
            lives,
            lambda _: self._read(lives, sampler, tokens, logprobs),
            chains=chains,
        )

    def _allowed(self, lives: tuple[Live, ...]) -> mx.array | None:
        """``[B, V]`` bool: which tokens may come next; None if any may in every row.

        A row whose constraint raises is at fault alone.
        """
        masks: list[bytes | None] = []
        for live in lives:
            try:
                masks.append(None if live.constraint is None or live.ended else live.constraint.allowed())
            except Exception as fault:
                self._on_fault(live, fault)
                masks.append(None)
        return token_mask(masks, self._model.description.vocab_size)

    def _decode_logits(self, rows: list[Row], positions: list[int], tokens: mx.array) -> mx.array:
        size = self._choices.fixed_size
        if size is not None:
            return run_fixed(self._model, self._store, rows, positions, tokens, size)
        for row, position in zip(rows, positions, strict=True):
            self._store.make_room(row, position + 1)
        offsets = mx.array(positions, mx.int32)
        arrays = layer_arrays(self._store, rows)
        if self.compiled is not None and self._choices.compiles(len(rows)):
            shape = decode_shape(self._store, rows, positions, exact=False)
            if self.compiled.is_worth_it(shape):
                return self.compiled.run(shape, tokens, offsets, arrays)
        shape = decode_shape(self._store, rows, positions, exact=True)
        return run_decode(self._model, shape, tokens, offsets, arrays)

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

    # --- prefill ------------------------------------------------------------------

    def _build_prefill(self, lives: tuple[Live, ...], piece: ChunkSlice) -> Launched:
        """Of a chunk in parts, ``piece`` is one part of one layer."""
        if piece.first_layer == 0 and piece.first_part == 0:
            self._prefilling = _Chunk(self._begin(lives, piece), _Clock())
        assert self._prefilling is not None
        part, clock = self._prefilling.parts[piece.first_part], self._prefilling.clock
        batch, first, last = part.batch, piece.first_layer, max(piece.last_layer, piece.first_layer + 1)
        inputs = self._model.run_layers(part.inputs, batch, first, last)
        written = batch.written(first, last)
        layers = last - first
        if piece.last_layer < self._layers:
            part.inputs = inputs
            return Launched(
                [*inputs],
                lives,
                lambda spent: self._timed(lives, clock, spent, layers, piece),
                written=written,
            )
        self._prefilling = None
        hidden = inputs[0]
        for live in lives:
            end = live.sequence.prompt_tokens if piece.is_pack else piece.end
            self.prefill_tokens += end - piece.start
            live.sequence.prefilled = end
        capture = None
        if self._reuse is not None and not piece.is_pack:
            capture = self._reuse.capture(lives[0], piece.end)
        captured = [] if capture is None else capture.arrays
        if lives[0].sequence.is_prefilling:

            def complete(spent: float) -> None:
                self._timed(lives, clock, spent, layers, piece)
                self._chunk_read(lives, piece, clock, capture)

            return Launched([hidden, *captured], lives, complete, written=written)
        sampler = Sampler([live.sampled for live in lives], self._model.description.vocab_size, None)
        logits = self._model.logits(_last_positions(hidden, batch, lives))
        tokens, logprobs = sampler.sample(logits, [0] * len(lives), self._allowed(lives))
        for index, live in enumerate(lives):
            live.last_token = None if live.ended else (tokens, index)
            live.sequence.launched = 1

        def complete_prompt(spent: float) -> None:
            clock.seconds += spent
            self._chunk_read(lives, piece, clock, capture)
            self._read(lives, sampler, tokens, logprobs)

        return Launched([tokens, *logprobs, *captured], lives, complete_prompt, written=written)

    def _begin(self, lives: tuple[Live, ...], piece: ChunkSlice) -> list[_Part]:
        if piece.is_pack:
            return [self._begin_pack(lives, piece.end)]
        (live,) = lives
        return [self._begin_part(live, start, end) for start, end in piece.part_bounds]

    def _begin_part(self, live: Live, start: int, end: int) -> _Part:
        ids = live.request.prompt.ids[start:end]
        spans = _spans_in(live, start, end)
        batch = ChunkBatch(self._store, _row(live), start, len(ids), spans)
        media = None
        if spans:
            moved = tuple(replace(span, start=span.start - start) for span in spans)
            media = MediaEmbeddings(moved, tuple(live.seen.pop(span.picture) for span in spans))
        return _Part(batch, self._model.embed(mx.array([ids], mx.int32), media))

    def _begin_pack(self, lives: tuple[Live, ...], end: int) -> _Part:
        prompts = [live.request.prompt.ids for live in lives]
        padded = [[*ids, *[0] * (end - len(ids))] for ids in prompts]
        pack = PackBatch(self._store, [_row(live) for live in lives], [len(ids) for ids in prompts])
        return _Part(pack, self._model.embed(mx.array(padded, mx.int32)))

    def _timed(
        self, lives: tuple[Live, ...], clock: _Clock, seconds: float, layers: int, piece: ChunkSlice
    ) -> None:
        for live in lives:
            live.progressed_at = time.monotonic()
        clock.seconds += seconds
        if piece.parts == 1:
            self.layer_seconds.took(piece.tokens, layers, seconds)
        else:
            self.part_seconds.took(piece.first_layer, piece.part_tokens, piece.end, seconds)

    # --- what may be wanted again -------------------------------------------------

    def _chunk_read(
        self, lives: tuple[Live, ...], piece: ChunkSlice, clock: _Clock, capture: Capture | None
    ) -> None:
        """A chunk was computed, all its layers, and what was captured of it is there."""
        if self._reuse is None or piece.is_pack:
            return
        self._reuse.took(piece.end - piece.start, clock.seconds)
        if capture is not None:
            self._reuse.computed(capture)
        if piece.end == lives[0].sequence.prompt_tokens:
            self._reuse.prefilled(lives[0])

    def _decoded_captures(self, lives: tuple[Live, ...], reuse: Reuse) -> list[Capture]:
        """The parts of rows that this step brings to the end of a block."""
        held = [(live, live.sequence.prompt_tokens + live.sequence.launched - 1) for live in lives]
        captures = [reuse.capture_decoded(live, tokens) for live, tokens in held if not live.ended]
        return [capture for capture in captures if capture is not None]

    def _choice_with(
        self,
        captures: list[Capture],
        lives: tuple[Live, ...],
        sampler: Sampler,
        tokens: mx.array,
        logprobs: tuple[mx.array, ...],
    ) -> Launched:
        """A decode step of which ``captures`` are kept. The next is launched when it is done: it may not copy slabs."""

        def complete(_: float) -> None:
            for capture in captures:
                assert self._reuse is not None
                self._reuse.computed_decoded(capture)
            self._read(lives, sampler, tokens, logprobs)

        arrays = [array for capture in captures for array in capture.arrays]
        return Launched([tokens, *logprobs, *arrays], lives, complete)

    # --- pictures -----------------------------------------------------------------

    def _build_look(self, live: Live, piece: TowerSlice) -> Launched:
        vision, picture = self._model.vision, live.request.pictures[piece.picture]
        assert vision is not None
        if piece.starts:
            self._looking = (live, vision.start(picture))
        assert self._looking is not None
        inputs = vision.run_layers(self._looking[1], piece.first_layer, piece.last_layer)
        layers = piece.last_layer - piece.first_layer + piece.starts
        if piece.last_layer < vision.tower_layers:
            self._looking = (live, inputs)
            return Launched(
                [*inputs], (live,), lambda spent: self._looked(live, spent, layers, picture.soft_tokens)
            )
        self._looking = None
        seen = live.seen[piece.picture] = vision.finish(inputs)

        def complete(spent: float) -> None:
            self._looked(live, spent, layers, picture.soft_tokens)
            if self._pictures is not None:
                self._pictures.put(picture.digest, seen)

        return Launched([seen], (live,), complete)

    def _looked(self, live: Live, spent: float, layers: int, tokens: int) -> None:
        live.progressed_at = time.monotonic()
        self.tower_layer_seconds.took(tokens, layers, spent)

    # --- launch and read ----------------------------------------------------------

    def _launch(self, work: Launched | None) -> None:
        previous, self._inflight = self._inflight, None
        chained = self._choices.chained and previous is not None and previous.chains
        chained = chained and work is not None and work.chains
        try:
            if previous is not None and not chained:
                mx.eval(previous.arrays)
            finished_at = time.monotonic()
            if work is None:
                self._store.finish()
            else:
                work.launched_at = (
                    time.monotonic()
                )  # before: a backend may compute some of it while it is launched
                mx.async_eval(work.arrays, work.written)  # type: ignore[no-untyped-call]  # MLX's stub has no types here
                work.written.clear()  # held, it would be copied by the next compiled step, which gives new arrays
            if previous is not None and chained:
                mx.eval(previous.arrays)
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
            self.first_tokens += not live.tokens
            found = sampler.read_logprobs(index, token, arrays)
            try:
                reason = live.take_token(token, self._model.stop_ids, found)
            except Exception as fault:  # a parser that raises must not end its neighbours
                self._on_fault(live, fault)
                continue
            if reason is not None:
                self._on_finish(live, reason)
        wake_readers(live.stream for live in lives)


def _spans_in(live: Live, start: int, end: int) -> tuple[MediaSpan, ...]:
    return tuple(span for span in live.sequence.spans if start <= span.start < end)


def _row(live: Live) -> Row:
    assert live.row is not None
    return live.row


def _last_positions(hidden: mx.array, batch: ChunkBatch | PackBatch, lives: tuple[Live, ...]) -> mx.array:
    """``[len(lives), 1, H]``: the hidden state of each prompt's last token."""
    if isinstance(batch, ChunkBatch):
        return hidden[:, -1:]
    rows = [batch.rows.index(_row(live)) for live in lives]
    return last_positions(hidden, rows, [live.sequence.prompt_tokens for live in lives])
