"""Notices a ledger that refuses everybody: pure, on a clock that is passed in.

Always true: nothing is called stuck unless every attempt failed, without a pause of more
than ``LONGEST_GAP_SECONDS``, for ``STREAK_SECONDS``; a success or a release starts anew.
"""

from __future__ import annotations

STREAK_SECONDS = 120.0
LONGEST_GAP_SECONDS = 30.0
STALE_SECONDS = 600.0
"""A reservation of this age that nobody vouches for is dropped when the ledger is stuck."""

REPORT_SECONDS = 60.0


class Audit:
    """Told of every attempt; not thread-safe."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._failed_at = 0.0
        self._reported_at: float | None = None

    def worked(self) -> None:
        """A reservation was made or given back."""
        self._began_at = None

    def failed(self, now: float) -> float | None:
        """A reservation was refused. The streak's seconds if it is time to report that everything is."""
        if self._began_at is None or now - self._failed_at > LONGEST_GAP_SECONDS:
            self._began_at = now
        self._failed_at = now
        streak = now - self._began_at
        if streak < STREAK_SECONDS:
            return None
        if self._reported_at is not None and now - self._reported_at < REPORT_SECONDS:
            return None
        self._reported_at = now
        return streak
