"""What prefill and fetching cost on this machine, measured while they happen.

Always true: no rate is negative; one odd measurement moves a rate by no more than ``SMOOTHING``
of the way; a place that looked too slow is tried again some time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from darkbloom_core.prefix._plan import Costs

SMOOTHING = 0.2

ASSUMED_PREFILL_MILLISECONDS_PER_TOKEN = 0.5
ASSUMED_FETCH_MILLISECONDS_PER_BYTE = 1e-6
"""A gigabyte in a second, until it was measured."""


FORGETTING = 0.95
"""What each hit that did not seem to pay leaves of the rates that said so, measured or assumed."""


class Rates:
    """Smoothed measurements. Thread-safe. ``assumed`` are milliseconds per byte of places, to begin with.

    ``hit_milliseconds`` is what a hit costs besides its bytes.
    """

    def __init__(self, assumed: Mapping[str, float], hit_milliseconds: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._prefill: float | None = None
        self._fetch: dict[str, float | None] = dict.fromkeys(assumed)
        self._assumed = dict(assumed)
        self._hit_milliseconds = hit_milliseconds

    def prefilled(self, tokens: int, milliseconds: float) -> None:
        """A chunk of ``tokens`` tokens took this long, all layers together."""
        with self._lock:
            self._prefill = _moved(self._prefill, milliseconds, tokens)

    def fetched(self, place: str, size_bytes: int, milliseconds: float) -> None:
        """So many bytes of parts came from ``place`` and into a row in this time, ``hit_milliseconds`` not counted."""
        with self._lock:
            self._fetch[place] = _moved(self._fetch.get(place), milliseconds, size_bytes)

    def declined(self, places: Iterable[str]) -> None:
        """A hit out of these places was not taken for its cost.

        If that is due to one odd measurement, or to what is assumed before any, one will be taken some time.
        """
        with self._lock:
            for place in places:
                rate = self._fetch.get(place)
                if rate is None:
                    self._assumed[place] = self._assumption(place) * FORGETTING
                else:
                    self._fetch[place] = rate * FORGETTING

    def costs(self) -> Costs:
        """What the planner is given now."""
        with self._lock:
            fetch = {
                place: self._assumption(place) if rate is None else rate
                for place, rate in self._fetch.items()
            }
            prefill = self._prefill
        return Costs(
            prefill_milliseconds_per_token=(
                ASSUMED_PREFILL_MILLISECONDS_PER_TOKEN if prefill is None else prefill
            ),
            fetch_milliseconds_per_byte=fetch,
            hit_milliseconds=self._hit_milliseconds,
        )

    def _assumption(self, place: str) -> float:
        return self._assumed.get(place, ASSUMED_FETCH_MILLISECONDS_PER_BYTE)


def _moved(rate: float | None, milliseconds: float, count: int) -> float | None:
    if count <= 0 or milliseconds < 0:
        return rate
    measured = milliseconds / count
    return measured if rate is None else rate + SMOOTHING * (measured - rate)
