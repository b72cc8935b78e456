"""Prefix reuse in the engine: what becomes of each prompt between its admission and its first token.

A sequence is *held*, that is, admitted but not stepped, while another computes what it will
take over, while tiers fetch, and while parts are copied into its row. Everything here runs
on the engine's thread, except where it says otherwise.

Always true: what a sequence has here goes with it, whichever way it ends; a tier that fails,
or does not answer in the time that reuse would save, costs that time and nothing else; in a
sequence's row nothing is written while a step that was launched may still read it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from darkbloom_core.contracts import MediaSpan, PartKey
from darkbloom_core.engine._budget import CacheBudget
from darkbloom_core.engine._kv import KvStore
from darkbloom_core.engine._live import Live
from darkbloom_core.engine._options import LookupOutcome, PrefixOptions, PrefixStatus
from darkbloom_core.engine._parts import HeldPart, adopt, packed
from darkbloom_core.engine._request import GenerationRequest
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.engine._spill import Spill
from darkbloom_core.memory import Share
from darkbloom_core.prefix import (
    BLOCK_TOKENS,
    PART_NAMES,
    RAM,
    CacheStack,
    PartLayout,
    PartName,
    PictureSpan,
    PlannedFetch,
    PrefillSharing,
    PromptParts,
    RamTier,
    Rates,
    ReusePlan,
    StagedPart,
    Staging,
    TailPolicy,
    Where,
    block_hashes,
    chain_root,
    numerics_id,
    plan_reuse,
    saved_milliseconds,
    scope_salt,
)

log = logging.getLogger(__name__)

LEAST_STAGING_SECONDS = 0.05
MOST_STAGING_SECONDS = 8.0
"""How long tiers may take to fetch: as long as the prefill that they save, within these bounds."""

RAM_MILLISECONDS_PER_BYTE = 2e-7
"""Assumed of adoption until it was measured: 5 gigabytes in a second."""


@dataclass(slots=True, eq=False)
class _Use:
    """One sequence. ``kept_tokens`` is how far its parts are captured, ``coming_bytes`` those that are not held yet."""

    live: Live
    parts: PromptParts
    names: Sequence[bytes]
    plan: ReusePlan
    outcome: LookupOutcome = "absent"
    is_planned: bool = False
    trusts_tiers: bool = True
    staging: Staging | None = None
    staged_at: float = 0.0
    fetched_after: float = 0.0
    adoption: Iterator[list[HeldPart]] | None = None
    adoption_seconds: float = 0.0
    kept_tokens: int = 0
    coming_bytes: int = 0
    keeps: bool = True


@dataclass(slots=True, eq=False)
class Capture:
    """Parts of a chunk, lazily: evaluate ``arrays`` with it, then give it to ``Reuse.computed``."""

    use: _Use
    end: int
    parts: list[HeldPart] = field(default_factory=list)
    known: list[PartKey] = field(default_factory=list)
    is_whole: bool = True

    @property
    def arrays(self) -> list[mx.array]:
        return [one.array for one in self.parts]

    @property
    def size_bytes(self) -> int:
        return sum(one.array.nbytes for one in self.parts)


class Reuse:
    """Of one engine. ``wake`` may be called from any thread and lets ``advance`` be called soon.

    ``on_fault`` is told of a sequence whose row could not be filled. ``chunk_seconds`` is what
    a chunk took at warm-up. RAM holds at most ``most_parts`` parts, each of which is an array.
    """

    def __init__(
        self,
        options: PrefixOptions,
        store: KvStore,
        share: Share,
        wake: Callable[[], None],
        on_fault: Callable[[Live, Exception], None],
        chunk_seconds: float | None,
        most_parts: int,
    ) -> None:
        numerics = options.numerics
        if options.relaxed:
            numerics = replace(numerics, kernels={**numerics.kernels, "reuse": "relaxed"})
        self._numerics = numerics_id(numerics)
        self._secret = options.secret
        self._store = store
        self._wake = wake
        self._on_fault = on_fault
        self.layout = PartLayout(store.layers, BLOCK_TOKENS if options.relaxed else numerics.chunk_tokens)
        tiers = options.open_tiers()
        self.stack = CacheStack(RamTier(0, most_parts), tiers, share.ledger)
        self.budget = CacheBudget(share, self.stack.ram, options.ram_bytes)
        self._spill = Spill(self.stack.offer_below, self.stack.ram.get) if tiers else None
        self._policy = TailPolicy()
        self._sharing = PrefillSharing()
        self.rates = Rates(self._assumed_rates(), self._measure_hit())
        if chunk_seconds is not None:
            self.took(numerics.chunk_tokens, chunk_seconds)
        self._uses: dict[str, _Use] = {}
        self._adopting: _Use | None = None
        self.follows_decoding = options.relaxed
        self._outcomes: dict[LookupOutcome, int] = {}
        self._tokens_reused = 0
        self._waits = 0

    # --- from admission to the first chunk ----------------------------------------------

    def admit(self, live: Live) -> None:
        """``live`` has its row. It may be held from now on."""
        ids, pictures = live.request.prompt.ids, picture_spans(live.request)
        cuts = chunk_ends(len(ids), self.layout.grid_tokens, live.request.prompt.spans)
        parts = self.layout.of(cuts)
        if not parts.lines:
            self._count("short")
            return
        names = block_hashes(ids, cuts, self._root(live.request), pictures)
        use = self._uses[live.request.id] = _Use(live, parts, names, ReusePlan(tokens=0, reason="absent"))
        self._begin(use)

    def advance(self, patience_seconds: float, settle: Callable[[], None]) -> None:
        """Bring on those that are held. ``settle`` waits for what was launched, before rows are written.

        Copying stops after ``patience_seconds`` and goes on at the next call. One row is filled at a
        time: copies on the way to it are not reserved.
        """
        for use in [use for use in self._uses.values() if use.live.sequence.held]:
            if use.live.ended:
                continue
            if use.staging is None and not self._keeps_waiting(use):
                self._begin(use)
            if use.staging is None or not self._is_fetched(use, use.staging):
                continue
            if self._adopting is not None and self._adopting is not use:
                continue
            settle()
            if not use.live.ended:
                self._adopting = use
                self._adopt(use, use.staging, patience_seconds)

    @property
    def is_busy(self) -> bool:
        """Whether any sequence is held."""
        return any(use.live.sequence.held for use in self._uses.values())

    @property
    def has_work(self) -> bool:
        """Whether ``advance`` would bring somebody on now."""
        return any(
            not self._sharing.waits(name) if use.staging is None else use.staging.is_ready
            for name, use in self._uses.items()
            if use.live.sequence.held
        )

    def seconds_to_deadline(self) -> float | None:
        """Until ``advance`` must be called even if nobody wakes the engine."""
        waiting = [use for use in self._uses.values() if use.staging is not None and not use.staging.is_ready]
        now = time.monotonic()
        return min((max(0.0, self._patience(use) - (now - use.staged_at)) for use in waiting), default=None)

    def end(self, live: Live) -> None:
        """``live`` has ended in whatever way. Idempotent."""
        use = self._uses.pop(live.request.id, None)
        if use is not None:
            use.adoption = None
            if self._adopting is use:
                self._adopting = None
            if use.staging is not None:
                use.staging.close()
        self._sharing.leave(live.request.id)

    def _begin(self, use: _Use, *, cold: bool = False) -> None:
        live = use.live
        plan = ReusePlan(tokens=0, reason="absent") if cold else self._plan(use)
        use.plan, use.staging = plan, None
        live.sequence.held = True
        tails = self._policy.to_keep(use.parts, use.names)
        if self._sharing.enter(live.request.id, use.names, use.parts, plan.tokens, tails) is not None:
            self._waits += 1
        elif plan.tokens == 0:
            self._go_on(use)
        else:
            self._stage(use, plan)

    def _plan(self, use: _Use) -> ReusePlan:
        where = self.stack.where(use.names, use.parts)
        trusted = where if use.trusts_tiers else _only_ram(where)
        plan = plan_reuse(use.parts, trusted, self.rates.costs())
        if not use.is_planned:
            use.is_planned, use.outcome = True, plan.reason
            if plan.missed_boundary is not None:
                self._policy.missed(use.names[use.parts.count(plan.missed_boundary) - 1])
            self.rates.declined(plan.declined_places)
        return plan

    def _stage(self, use: _Use, plan: ReusePlan) -> None:
        use.staged_at = time.monotonic()
        use.staging = self.stack.stage(use.live.request.id, plan, use.names)
        if use.staging is None:
            self._fail(use)
        elif not use.staging.is_ready:
            use.staging.when_ready(self._wake)

    def _fail(self, use: _Use) -> None:
        """What was planned did not come: without the tiers, and in the end without reuse."""
        if use.staging is not None:
            use.staging.close()
        use.outcome = "failed"
        cold, use.trusts_tiers = not use.trusts_tiers, False
        self._begin(use, cold=cold)

    def _keeps_waiting(self, use: _Use) -> bool:
        """Whether another still computes what ``use`` waits for; what that one does is progress for both."""
        leader = self._sharing.awaited(use.live.request.id)
        if leader is None:
            return False
        use.live.progressed_at = max(use.live.progressed_at, self._uses[leader].live.progressed_at)
        return True

    def _is_fetched(self, use: _Use, staging: Staging) -> bool:
        if use.adoption is not None:
            return True
        seconds = time.monotonic() - use.staged_at
        if not staging.is_ready:
            if seconds > self._patience(use):
                self._note_fetched(use.plan.fetches, seconds, 0.0)
                self._fail(use)
            return False
        parts = staging.parts()
        if parts is None:
            self._fail(use)
            return False
        use.fetched_after = seconds
        row = use.live.row
        assert row is not None
        use.adoption = adopt(use.parts, self._store, row, parts, use.plan.tokens)
        return True

    def _patience(self, use: _Use) -> float:
        saved = use.plan.saved_milliseconds / 1000
        return min(MOST_STAGING_SECONDS, max(LEAST_STAGING_SECONDS, saved))

    def _adopt(self, use: _Use, staging: Staging, patience_seconds: float) -> None:
        assert use.adoption is not None
        began = time.monotonic()
        try:
            for parts in use.adoption:
                self._promote(use, parts)
                use.live.progressed_at = time.monotonic()
                if use.live.progressed_at - began > patience_seconds:
                    use.adoption_seconds += use.live.progressed_at - began
                    return
        except Exception as fault:
            self._on_fault(use.live, fault)
            return
        self._adopting = None
        use.adoption_seconds += time.monotonic() - began
        staging.close()
        self._note_fetched(use.plan.fetches, use.fetched_after, use.adoption_seconds)
        use.adoption = use.staging = None
        use.live.sequence.prefilled = use.live.cached_tokens = use.kept_tokens = use.plan.tokens
        self._tokens_reused += use.plan.tokens
        use.outcome = "hit"
        self._go_on(use)

    def _go_on(self, use: _Use) -> None:
        use.live.sequence.held = False
        self._count(use.outcome)

    def _promote(self, use: _Use, parts: Sequence[HeldPart]) -> None:
        for one in parts:
            if one.comes_from_below:
                self._make_room(one.array.nbytes)
                self._keep(use, one)

    def _note_fetched(
        self, fetches: Sequence[PlannedFetch], fetch_seconds: float, adoption_seconds: float
    ) -> None:
        """Share the measured time among places: adoption by bytes, the time of fetching to those below RAM."""
        sizes: dict[str, int] = {}
        for fetch in fetches:
            sizes[fetch.place] = sizes.get(fetch.place, 0) + fetch.size_bytes
        adoption = max(0.0, adoption_seconds * 1000 - self.rates.costs().hit_milliseconds)
        for place, size in sizes.items():
            fetching = 0.0 if place == RAM else fetch_seconds * 1000
            if place != RAM or adoption_seconds > 0:
                self.rates.fetched(place, size, adoption * size / sum(sizes.values()) + fetching)

    # --- what prefill computes ----------------------------------------------------------

    def capture(self, live: Live, end: int) -> Capture | None:
        """The parts to keep of ``live``, whose chunk up to ``end`` is built but not launched."""
        use = self._uses.get(live.request.id)
        if use is None or not use.parts.is_line(end):
            return None
        return self._capture(use, end, self._sharing.tails(live.request.id))

    def took(self, tokens: int, seconds: float) -> None:
        """A chunk took this long."""
        if tokens >= BLOCK_TOKENS:  # a short one costs more per token, and reuse never spares it
            self.rates.prefilled(tokens, seconds * 1000)

    def computed(self, capture: Capture) -> None:
        """The chunk of ``capture`` was read, its arrays are evaluated."""
        use = capture.use
        if self._uses.get(use.live.request.id) is not use:
            return
        is_kept = capture.is_whole
        for one in sorted(capture.parts, key=lambda one: (PART_NAMES.index(one.part), one.block)):
            is_held = self._keep(use, one)
            is_kept = is_kept and is_held
            if one.part == "full" and not is_held and self._spill is None:
                use.keeps = False  # of the blocks after it none would be held either
            if self._spill is not None:
                self._spill.offer(PartKey(use.names[one.block], one.part), one.array)
        use.coming_bytes -= capture.size_bytes
        self.stack.ram.renew(capture.known)
        self._sharing.computed(use.live.request.id, capture.end, is_kept=is_kept)

    def prefilled(self, live: Live) -> None:
        """The last chunk of ``live`` was read."""
        use = self._uses.get(live.request.id)
        if use is None:
            return
        tails = self._sharing.tails(live.request.id)
        self.stack.ram.renew([PartKey(use.names[block], part) for block, part in tails])
        self._tell_tiers(use, tails)
        self._sharing.leave(live.request.id)
        if not self.follows_decoding:
            del self._uses[live.request.id]

    def _tell_tiers(self, use: _Use, tails: Iterable[tuple[int, PartName]]) -> None:
        """Tell the tiers below RAM what the prompt consists of, and hand them what they want and RAM has."""
        if self._spill is None:
            return
        full: list[tuple[int, PartName]] = [
            (block, "full") for block in range(len(use.names)) if use.parts.needs_full(block)
        ]
        taken = [(fetch.block, fetch.part) for fetch in use.plan.fetches if fetch.part != "full"]
        parts = dict.fromkeys([*full, *taken, *sorted(tails)])
        self._spill.offer_held(self.stack.used([PartKey(use.names[block], part) for block, part in parts]))

    def capture_decoded(self, live: Live, tokens: int) -> Capture | None:
        """Like ``capture``, of a row that holds ``tokens`` tokens after a decode step that is built."""
        use = self._uses.get(live.request.id)
        if use is None or tokens % BLOCK_TOKENS:
            return None
        use.parts = self.layout.of(chunk_ends(tokens, self.layout.grid_tokens, live.request.prompt.spans))
        return self._capture(use, tokens, frozenset(use.parts.needs_at(tokens)))

    def computed_decoded(self, capture: Capture) -> None:
        """Like ``computed``; the tokens up to the capture's end are in ``live.tokens`` now."""
        live, use = capture.use.live, capture.use
        ids = [*live.request.prompt.ids, *live.tokens][: capture.end]
        if live.ended or len(ids) < capture.end:
            return
        pictures = picture_spans(live.request)
        cuts = chunk_ends(len(ids), self.layout.grid_tokens, live.request.prompt.spans)
        use.names = block_hashes(ids, cuts, self._root(live.request), pictures)
        self.computed(capture)

    def _capture(self, use: _Use, end: int, tails: frozenset[tuple[int, PartName]]) -> Capture | None:
        row, first = use.live.row, use.kept_tokens
        use.kept_tokens = end
        capture = Capture(use, end, is_whole=use.keeps)
        if not use.keeps or row is None:
            return capture
        numbers = [number for number, block in enumerate(use.parts.blocks) if first <= block.start < end]
        wanted = [
            (number, part)
            for number in numbers
            for part in PART_NAMES
            if (use.parts.needs_full(number) if part == "full" else (number, part) in tails)
        ]
        captured = self._store.capture(row, first, end)
        for block, part in wanted:
            key = PartKey(use.names[block], part) if block < len(use.names) else None
            if key is not None and self.stack.ram.probe(key) is not None:
                capture.known.append(key)
                continue
            array = packed(use.parts, captured, block, part, end)
            if array is None:
                capture.is_whole = False
            else:
                capture.parts.append(HeldPart(block, part, array))
        use.coming_bytes += capture.size_bytes
        self._make_room()
        return capture

    def _make_room(self, size_bytes: int = 0) -> None:
        """Reserve what is on its way to RAM."""
        self.budget.grow(size_bytes + sum(use.coming_bytes for use in self._uses.values()))

    def _keep(self, use: _Use, one: HeldPart) -> bool:
        rate = self.rates.costs().prefill_milliseconds_per_token
        return self.stack.promote(
            PartKey(use.names[one.block], one.part),
            one.array,
            one.array.nbytes,
            saves_milliseconds=saved_milliseconds(one.block, one.part, use.parts, rate),
            parent=use.names[one.block - 1] if one.block else None,
        )

    # --- the whole ------------------------------------------------------------------------

    def status(self) -> PrefixStatus:
        """From any thread."""
        return PrefixStatus(
            outcomes=dict(self._outcomes),
            tokens_reused=self._tokens_reused,
            waits=self._waits,
            parts_unoffered=0 if self._spill is None else self._spill.dropped,
            tiers=self.stack.stats(),
            faults=self.stack.faults(),
            reserved_bytes=self.budget.reserved_bytes,
        )

    def close(self) -> None:
        """Let everything go and close the tiers. Idempotent."""
        for use in tuple(self._uses.values()):
            self.end(use.live)
        self.abandon()

    def abandon(self) -> None:
        """Close the tiers. From any thread, also while the engine's own hangs. Idempotent."""
        if self._spill is not None:
            self._spill.close()
        self.budget.close()
        self.stack.close()

    def _root(self, request: GenerationRequest) -> bytes:
        return chain_root(self._numerics, scope_salt(self._secret, request.scope, request.cache_key))

    def _count(self, outcome: LookupOutcome) -> None:
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def _assumed_rates(self) -> dict[str, float]:
        """Milliseconds per byte of each place before the first fetch, adoption included."""
        found = {RAM: RAM_MILLISECONDS_PER_BYTE}
        for place, stats in self.stack.stats().items():
            measured = stats.read_milliseconds_per_byte
            reading = 9 * RAM_MILLISECONDS_PER_BYTE if measured is None else measured
            if place != RAM:
                found[place] = RAM_MILLISECONDS_PER_BYTE + reading
        return found

    def _measure_hit(self) -> float:
        """Milliseconds of the least adoption there is: one grid cell's, the second time."""
        tokens = self.layout.grid_tokens
        cell = self.layout.of([tokens])
        wanted = [
            (block, part)
            for block in range(len(cell.blocks))
            for part in PART_NAMES
            if cell.part_bytes(block, part)
        ]
        row = self._store.open_row(tokens, tokens + 1)
        captured = self._store.capture(row, 0, tokens)
        arrays = [packed(cell, captured, block, part, tokens) for block, part in wanted]
        mx.eval(arrays)
        self._store.close_row(row)
        parts = [StagedPart(*one, array, None) for one, array in zip(wanted, arrays, strict=True)]
        seconds = 0.0
        for _ in range(2):
            row = self._store.open_row(tokens, tokens + 1)
            began = time.monotonic()
            for _ in adopt(cell, self._store, row, parts, tokens):
                pass
            seconds = time.monotonic() - began
            self._store.close_row(row)
        return seconds * 1000


def _only_ram(where: Where) -> Where:
    return lambda block, part: RAM if where(block, part) == RAM else None


def chunk_ends(tokens: int, grid: int, spans: tuple[MediaSpan, ...]) -> list[int]:
    """The ends of all chunks of a prompt, as the scheduler cuts them."""
    ends: list[int] = []
    while not ends or ends[-1] < tokens:
        ends.append(chunk_end(ends[-1] if ends else 0, tokens, grid, spans))
    return ends


def picture_spans(request: GenerationRequest) -> tuple[PictureSpan, ...]:
    """The pictures behind the prompt's soft tokens."""
    return tuple(
        PictureSpan(span.start, span.length, request.pictures[span.picture].digest)
        for span in request.prompt.spans
    )
