"""Whether an engine is alive: pure state machines over counters and a clock that is passed in.

A slow engine is not a dead one: as long as steps are counted, nothing is suspected. The
thresholds are those that the reference provider settled on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

STEP_SECONDS = 30.0
"""A single step that takes longer makes the engine unhealthy until it returns."""

Wedge = Literal["none", "suspected", "confirmed"]


@dataclass(frozen=True, slots=True)
class WedgeRule:
    """``admits`` requests without a first token, the oldest for ``seconds``, while no step ended for ``seconds``."""

    admits: int
    seconds: float


SUSPECTED = WedgeRule(3, 10.0)
CONFIRMED = WedgeRule(1, 120.0)


class WedgeMonitor:
    """Told what happens, says whether the engine looks wedged. Not thread-safe; times are seconds of any one clock."""

    def __init__(self) -> None:
        self.admits = 0
        self.first_tokens = 0
        self._hanging: deque[float] = deque()
        self._stepped_at: float | None = None
        self._step_began_at: float | None = None

    def admitted(self, now: float) -> None:
        """A request got a row."""
        self.admits += 1
        self._hanging.append(now)
        if self._stepped_at is None:
            self._stepped_at = now

    def first_token(self) -> None:
        """Some request got its first token: whatever hung before, hangs no more."""
        self.first_tokens += 1
        self._hanging.clear()

    def ended_without_token(self) -> None:
        """A request ended before its first token: the oldest hanging one is forgotten."""
        if self._hanging:
            self._hanging.popleft()

    def step_began(self, now: float) -> None:
        self._step_began_at = now

    def step_ended(self, now: float) -> None:
        self._stepped_at, self._step_began_at = now, None

    @property
    def hanging(self) -> int:
        """Requests with a row and no first token yet, since the last first token of any."""
        return len(self._hanging)

    def is_healthy(self, now: float) -> bool:
        """Whether no single step has been under way for ``STEP_SECONDS``."""
        return self._step_began_at is None or now - self._step_began_at <= STEP_SECONDS

    def wedge(self, now: float) -> Wedge:
        """What the counters say at ``now``."""
        if self._holds(CONFIRMED, now):
            return "confirmed"
        return "suspected" if self._holds(SUSPECTED, now) else "none"

    def _holds(self, rule: WedgeRule, now: float) -> bool:
        if len(self._hanging) < rule.admits or self._stepped_at is None:
            return False
        return now - self._hanging[0] >= rule.seconds and now - self._stepped_at >= rule.seconds
