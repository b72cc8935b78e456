"""The thread of one engine: takes what is on the desk, steps, and ends what is done.

Always true: a sequence leaves through ``_finish`` or ``end_all`` alone, once, and with it
go its reservation, its lane and its buffers.
"""

from __future__ import annotations

import logging
import math
import time
import traceback

from darkbloom_core.contracts import FinishReason, LoadedModel
from darkbloom_core.engine._admission import worst_case_bytes
from darkbloom_core.engine._build import Parts
from darkbloom_core.engine._desk import Desk
from darkbloom_core.engine._live import Live
from darkbloom_core.engine._liveness import WedgeMonitor
from darkbloom_core.engine._options import EngineOptions, PrefixOptions
from darkbloom_core.engine._pictures import MOST_PICTURES, PictureCache
from darkbloom_core.engine._rates import Rates
from darkbloom_core.engine._reuse import Reuse
from darkbloom_core.engine._runner import Runner, StepFault
from darkbloom_core.engine._scheduler import TowerSlice
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.errors import DarkbloomError, DeadlineExceeded, GenerationFailed
from darkbloom_core.memory import Share

log = logging.getLogger(__name__)

SLICE_SHARE = 0.7
"""What a slice is made to take of the time that it may: layers do not always take what the last ones took."""

LOOK_AGAIN_SECONDS = 1.0
"""How long a request that waits for memory sleeps before it is tried again."""


class Loop:
    """Runs on one thread; only counters are read from others. Without ``prefix`` no prompt reuses anything."""

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        parts: Parts,
        desk: Desk,
        share: Share,
        options: EngineOptions,
        prefix: PrefixOptions | None = None,
        pictures: PictureCache | None = None,
    ) -> None:
        self._name = name
        self._description = model.description
        self._desk = desk
        self._share = share
        self._options = options
        self.store = parts.store
        self.scheduler = parts.scheduler
        self.reuse = None if prefix is None else self._open_reuse(prefix, parts)
        self.pictures = pictures or PictureCache(share, 0)
        self.runner = Runner(
            model,
            parts.store,
            parts.choices,
            self._finish,
            self._break,
            options.chunk_tokens,
            self.reuse,
            self.pictures,
        )
        self.monitor = WedgeMonitor()
        self.rates = Rates()
        self.steps = 0

    def serve(self) -> None:
        """Step until the desk closes."""
        progressed = True
        try:
            while not self._desk.closing:
                if not progressed:
                    self._desk.wait(self._seconds_to_deadline())
                self._take_arrivals()
                self._look_after(time.monotonic())
                progressed = self._step()
        finally:
            self.runner.close()
            if self.reuse is not None:
                self.reuse.close()

    @property
    def live_arrays(self) -> int:
        """How many arrays rows and caches hold."""
        kept = 0 if self.reuse is None else self.reuse.stack.ram.parts
        return self.store.arrays + self.pictures.count + kept

    # --- between steps --------------------------------------------------------------

    def _take_arrivals(self) -> None:
        for live in self._desk.take_arrivals():
            self.scheduler.add(live.sequence)

    def _look_after(self, now: float) -> None:
        """Cancellations, deadlines, and readers that are slow or have caught up."""
        for live in self._desk.lives():
            if live.stream.cancelled:
                self._finish(live, "cancelled")
            elif now - live.progressed_at > self._options.progress_seconds:
                self._finish(live, "error", self._too_late(live))
            elif live.sequence.paused:
                live.sequence.paused = not live.stream.is_drained
            else:
                live.sequence.paused = live.stream.is_full

    def _seconds_to_deadline(self) -> float | None:
        """Until the first request that does not get on must end; None without requests.

        One that waits for memory is looked at again sooner: nobody tells when another program frees some.
        """
        lives = self._desk.lives()
        last = min((live.progressed_at for live in lives), default=None)
        if last is None:
            return None
        seconds = max(0.0, last + self._options.progress_seconds - time.monotonic()) + 0.001
        staging = None if self.reuse is None else self.reuse.seconds_to_deadline()
        if staging is not None:
            seconds = min(seconds, staging + 0.001)
        return min(seconds, LOOK_AGAIN_SECONDS) if any(live.row is None for live in lives) else seconds

    def _too_late(self, live: Live) -> DeadlineExceeded:
        where = "waiting" if live.row is None else "paused" if live.sequence.paused else "running"
        return DeadlineExceeded(f"no progress for {self._options.progress_seconds:g} seconds while {where}")

    # --- a step -----------------------------------------------------------------------

    def _step(self) -> bool:
        """Do what the scheduler plans; False if there was nothing to do until something new happens."""
        for sequence in self.scheduler.admit(self._reserve):
            self._admit(self._of(sequence))
        if self.reuse is not None and self.reuse.is_busy:
            self._advance(self.reuse)
        self._notice_pictures()
        plan = self.scheduler.plan(
            self._layers_per_slice(self.runner.layer_seconds.value),
            self._layers_per_slice(self.runner.tower_layer_seconds.value),
            self._part_share,
        )
        if plan.is_empty and self.runner.is_idle:
            return self.reuse is not None and self.reuse.has_work
        self.monitor.step_began(time.monotonic())
        first_tokens = self.runner.first_tokens
        try:
            if plan.is_empty:
                self.runner.settle()
            if plan.decode:
                self.runner.decode(self._in_order_of_lane(plan.decode))
            if isinstance(plan.prefill, TowerSlice):
                looking = self._desk.find(plan.prefill.sequence.id)
                if looking is not None:
                    self.runner.look(looking, plan.prefill)
            elif plan.prefill is not None:
                # reading the decode step may have ended sequences that were planned for
                lives = [self._desk.find(sequence.id) for sequence in plan.prefill.sequences]
                left = tuple(live for live in lives if live is not None)
                if left:
                    self.runner.prefill(left, plan.prefill)
        except StepFault as fault:
            self._fail(fault)
        if self.runner.first_tokens > first_tokens:
            self.monitor.first_token()
        self.monitor.step_ended(time.monotonic())
        self.steps += 1
        return True

    def _admit(self, live: Live) -> None:
        sequence = live.sequence
        live.admitted_at = live.progressed_at = time.monotonic()
        self.monitor.admitted(live.admitted_at)
        live.row = self.store.open_row(sequence.prompt_tokens, sequence.prompt_tokens + sequence.max_tokens)
        if self.reuse is not None:
            self.reuse.admit(live)

    def _reserve(self, sequence: Sequence) -> bool:
        size = worst_case_bytes(self._of(sequence).request, self._description)
        reserve = self._share.reserve if self.reuse is None else self.reuse.budget.reserve
        return reserve(sequence.id, size) or (self.pictures.trim(size) > 0 and reserve(sequence.id, size))

    def _notice_pictures(self) -> None:
        """Pictures that wait for the tower may have been seen meanwhile, for another sequence."""
        for sequence in self.scheduler.running:
            if not sequence.unseen or not sequence.wants_prefill:
                continue
            live = self._of(sequence)
            for span in sequence.spans:
                if span.picture in sequence.unseen and span.start >= sequence.prefilled:
                    seen = self.pictures.get(live.request.pictures[span.picture].digest)
                    if seen is not None:
                        live.seen[span.picture] = seen
                        sequence.unseen.discard(span.picture)

    def _advance(self, reuse: Reuse) -> None:
        """Bring on those whose prompts' beginnings come from elsewhere; others wait no longer than for a slice."""
        decodes = any(sequence.wants_decode for sequence in self.scheduler.running)
        try:
            reuse.advance(self._options.slice_seconds if decodes else math.inf, self.runner.settle)
        except StepFault as fault:
            self._fail(fault)

    def _open_reuse(self, prefix: PrefixOptions, parts: Parts) -> Reuse:
        layer_seconds = parts.choices.layer_seconds
        return Reuse(
            prefix,
            parts.store,
            self._share,
            self._desk.wake,
            lambda live, fault: self._fail(_row_fault(live, fault)),
            None if layer_seconds is None else layer_seconds * len(parts.store.layers),
            max(0, self._options.most_arrays - parts.store.most_arrays - MOST_PICTURES),
        )

    def _layers_per_slice(self, layer_seconds: float | None) -> int:
        if layer_seconds is None:
            return 1
        return max(1, int(SLICE_SHARE * self._options.slice_seconds / layer_seconds))

    def _part_share(self, layer: int, tokens: int, keys: int) -> float:
        """What such a part takes of a slice, in ``layer``; all of it, as long as none was timed."""
        seconds = self.runner.part_seconds.of(layer, tokens, keys)
        return 1.0 if seconds is None else seconds / (SLICE_SHARE * self._options.slice_seconds)

    def _in_order_of_lane(self, sequences: tuple[Sequence, ...]) -> tuple[Live, ...]:
        lives = [self._of(sequence) for sequence in sequences]
        return tuple(sorted(lives, key=lambda live: live.row.lane if live.row is not None else -1))

    def _of(self, sequence: Sequence) -> Live:
        live = self._desk.find(sequence.id)
        assert live is not None
        return live

    # --- ends ---------------------------------------------------------------------------

    def _fail(self, fault: StepFault) -> None:
        """End the sequences of a step that raised; the others go on, unless their storage broke too."""
        # as text: a log record that somebody keeps must not keep the frames, and with them rows and arrays
        story = "".join(traceback.format_exception(fault.__cause__))
        log.error("a step of %s failed: %s", self._name, story)
        members = fault.members if self.store.repair() else self._desk.lives()
        for live in members:
            if not live.ended:
                self._finish(live, "error", GenerationFailed("the step that generated this output failed"))

    def _break(self, live: Live, fault: Exception) -> None:
        if isinstance(fault, DarkbloomError):
            self._finish(live, "error", fault)
            return
        where = traceback.extract_tb(fault.__traceback__)[-1]  # the message itself could hold output
        kind = type(fault).__name__
        log.error("the output of a request of %s broke its parser: %s at %s:%s", self._name, kind, *where[:2])
        self._finish(live, "error", GenerationFailed("the output could not be parsed"))

    def _finish(self, live: Live, reason: FinishReason, error: DarkbloomError | None = None) -> None:
        if not self._desk.leave(live):
            return  # the engine was given up, and whoever did that has ended it
        self.scheduler.remove(live.sequence)
        if self.reuse is not None:
            self.reuse.end(live)
        if live.row is not None:
            self.runner.forget(live.row)
            self.store.close_row(live.row)
            live.row = None
            if not live.tokens:
                self.monitor.ended_without_token()
        self._share.release(live.sequence.id)
        live.end(reason, error)
        if reason in ("stop", "length"):
            live.tell_rates(self.rates)


def _row_fault(live: Live, fault: Exception) -> StepFault:
    """A fault of one sequence's row, as one of a step would be told."""
    told = StepFault((live,), fault)
    told.__cause__ = fault
    return told


def end_all(desk: Desk, share: Share, error: DarkbloomError | None) -> None:
    """When the thread ends, everything that is left ends: cancelled, or with ``error``."""
    for live in desk.clear():
        share.release(live.sequence.id)
        live.row = None
        live.end("cancelled" if error is None else "error", error)
