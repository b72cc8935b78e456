"""A sequence's life in the engine: what the scheduler knows of it, its storage, its text and its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from darkbloom_core.contracts import ContentDelta, Delta, FinishReason, ReasoningDelta, TokenConstraint
from darkbloom_core.engine._rates import Rates
from darkbloom_core.engine._request import (
    GenerationRequest,
    OutputDelta,
    OutputEnd,
    Timings,
    TokenLogprob,
    Usage,
)
from darkbloom_core.engine._sampling import SampledRow
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.engine._stream import OutputStream, wake_readers
from darkbloom_core.engine._text import TextPipeline
from darkbloom_core.errors import DarkbloomError

if TYPE_CHECKING:
    import mlx.core as mx

    from darkbloom_core.engine._kv import Row


@dataclass(slots=True, eq=False)
class Live:
    """Everything about one output between its admission and its terminal event.

    ``last_token`` is the array, and the index in it, that holds the last launched token,
    read or not. ``progressed_at`` is when it last got on. ``cached_tokens`` of the prompt were
    not computed for it. ``seen`` are the pictures, by their
    number, that the tower has been launched for and whose chunk has not.
    """

    request: GenerationRequest
    sequence: Sequence
    stream: OutputStream
    text: TextPipeline
    sampled: SampledRow
    submitted_at: float
    progressed_at: float
    row: Row | None = None
    ended: bool = False
    last_token: tuple[mx.array, int] | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    seen: dict[int, mx.array] = field(default_factory=dict)

    @property
    def constraint(self) -> TokenConstraint | None:
        """What may come next in the output, if not anything."""
        return self.request.constraint

    def take_token(
        self, token: int, stop_ids: frozenset[int], logprobs: tuple[TokenLogprob, ...]
    ) -> FinishReason | None:
        """Take one token that was read; emit what it brings; return the reason if it is the last.

        Whoever calls it wakes the stream's reader.
        """
        self.progressed_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.progressed_at
        self.tokens.append(token)
        deltas = self.text.push(token)
        if deltas or logprobs:
            self.stream.push(OutputDelta(deltas, logprobs))
        if self.text.stopped:
            return "stop"
        if self.constraint is not None:
            self.constraint.accept(token)
            if self.constraint.complete:
                return "stop"
        if token in stop_ids and not self.request.ignore_stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def end(self, reason: FinishReason, error: DarkbloomError | None) -> None:
        """Emit what was held back and the terminal event. The one door out."""
        self.ended = True
        self.last_token = None
        self.seen.clear()
        if reason in ("stop", "length") and not self.text.stopped:
            rest = merged(self.text.finish())
            if rest:
                self.stream.push(OutputDelta(rest))
        self.stream.push(OutputEnd(reason, self._usage(), self._timings(), error, self.text.stop_string))
        wake_readers((self.stream,))

    def tell_rates(self, rates: Rates) -> None:
        """After a good end: what this request says about the engine's speed."""
        usage, timings = self._usage(), self._timings()
        if timings.time_to_first_token_seconds is not None and timings.decode_seconds is not None:
            rates.ended(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                first_token_seconds=timings.time_to_first_token_seconds,
                decode_seconds=timings.decode_seconds,
            )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt.ids),
            completion_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=min(self.text.reasoning_tokens, len(self.tokens)),
        )

    def _timings(self) -> Timings:
        now = time.monotonic()
        first = self.first_token_at
        return Timings(
            queue_seconds=(self.admitted_at or now) - self.submitted_at,
            prefill_seconds=None if self.admitted_at is None else (first or now) - self.admitted_at,
            decode_seconds=None if first is None else now - first,
            time_to_first_token_seconds=None if first is None else first - self.submitted_at,
        )


def merged(deltas: Many[Delta]) -> tuple[Delta, ...]:
    """Neighbouring text deltas of one kind joined into one."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + delta.text)
        else:
            out.append(delta)
    return tuple(out)


@dataclass(slots=True)
class Launched:
    """Work that the device was given: the arrays that are done when it is done, and what to do then.

    ``written`` runs with it and is not waited for: by then the next step may have written
    there, too, and the wait would be for that step. ``chains`` says that the next step may be
    launched while this one runs, if chaining was chosen.
    """

    arrays: list[mx.array]
    members: tuple[Live, ...]
    complete: Callable[[float], None]
    chains: bool = False
    written: list[mx.array] = field(default_factory=list)
    launched_at: float = field(default_factory=time.monotonic)
