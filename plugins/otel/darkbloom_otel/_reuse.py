"""Metrics of prefix reuse, from the engines' samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from darkbloom_core.contracts import PrefixSample, TierSample
from darkbloom_otel import _names as names

OUTCOMES: dict[str, Callable[[PrefixSample], int]] = {
    "hit": lambda sample: sample.hits,
    "short": lambda sample: sample.missed_short,
    "absent": lambda sample: sample.missed_absent,
    "window": lambda sample: sample.missed_window,
    "cost": lambda sample: sample.missed_cost,
    "failed": lambda sample: sample.missed_failed,
}

PARTS: dict[str, Callable[[TierSample], int]] = {
    "full": lambda sample: sample.full_bytes,
    "window": lambda sample: sample.window_bytes,
    "state": lambda sample: sample.state_bytes,
}


class ReuseMetrics:
    """The last sample of each model and tier, read when somebody collects. Thread-safe."""

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()
        self._prefixes: dict[str, PrefixSample] = {}
        self._tiers: dict[tuple[str, str], TierSample] = {}
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter(names.PREFIX_LOOKUPS, [self._read_outcomes], "", "Prompts looked up, by what came of it")
        counter(
            names.PREFIX_REUSED,
            [partial(self._read_prefixes, lambda sample: sample.tokens_reused)],
            "",
            "Prompt tokens taken over from the cache",
        )
        counter(
            names.PREFIX_WAITS,
            [partial(self._read_prefixes, lambda sample: sample.waits)],
            "",
            "Requests that waited for what another was computing",
        )
        counter(
            names.PREFIX_UNOFFERED,
            [partial(self._read_prefixes, lambda sample: sample.parts_unoffered)],
            "",
            "Parts not offered to the tiers below memory",
        )
        gauge(names.CACHE_BYTES, [self._read_parts], "By", "What a tier holds, by kind")
        gauge(
            names.CACHE_LIMIT,
            [partial(self._read_tiers, lambda sample: sample.bytes_limit)],
            "By",
            "What a tier may hold",
        )
        counters: tuple[tuple[str, str, Callable[[TierSample], int]], ...] = (
            (names.CACHE_HITS, "Parts that a tier gave", lambda sample: sample.hits),
            (
                names.CACHE_MISSES,
                "Parts that a tier was asked for and had lost",
                lambda sample: sample.misses,
            ),
            (names.CACHE_EVICTIONS, "Parts that went for want of room", lambda sample: sample.evicted),
            (names.CACHE_REFUSALS, "Parts that a tier did not take", lambda sample: sample.dropped),
            (names.CACHE_FAULTS, "Times that a tier failed or gave a damaged part", _faults),
        )
        for name, description, read in counters:
            counter(name, [partial(self._read_tiers, read)], "", description)

    def record(self, event: PrefixSample | TierSample) -> None:
        """Remember the sample."""
        with self._lock:
            if isinstance(event, PrefixSample):
                self._prefixes[event.model] = event
            else:
                self._tiers[event.model, event.tier] = event

    def forget(self, model: str) -> None:
        """The model is gone."""
        with self._lock:
            self._prefixes.pop(model, None)
            self._tiers = {key: sample for key, sample in self._tiers.items() if key[0] != model}

    def _read_outcomes(self, options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            samples = list(self._prefixes.values())
        return [
            Observation(read(sample), {names.REQUEST_MODEL: sample.model, names.PREFIX_OUTCOME: outcome})
            for sample in samples
            for outcome, read in OUTCOMES.items()
        ]

    def _read_prefixes(
        self, read: Callable[[PrefixSample], int], options: CallbackOptions
    ) -> Iterable[Observation]:
        with self._lock:
            samples = list(self._prefixes.values())
        return [Observation(read(sample), {names.REQUEST_MODEL: sample.model}) for sample in samples]

    def _read_parts(self, options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            samples = list(self._tiers.values())
        return [
            Observation(read(sample), {**_of(sample), names.PART: part})
            for sample in samples
            for part, read in PARTS.items()
        ]

    def _read_tiers(
        self, read: Callable[[TierSample], int], options: CallbackOptions
    ) -> Iterable[Observation]:
        with self._lock:
            samples = list(self._tiers.values())
        return [Observation(read(sample), _of(sample)) for sample in samples]


def _faults(sample: TierSample) -> int:
    return sample.faults + sample.damaged


def _of(sample: TierSample) -> dict[str, str]:
    return {names.REQUEST_MODEL: sample.model, names.CACHE_TIER: sample.tier}
