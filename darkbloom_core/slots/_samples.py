"""How an engine stands, as telemetry events."""

from __future__ import annotations

from collections.abc import Iterator

from darkbloom_core.contracts import EngineSample, Event, PrefixSample, SlotActivity, TierSample, TierStats
from darkbloom_core.engine import EngineStatus, LookupOutcome, PrefixStatus


def engine_samples(model: str, activity: SlotActivity, status: EngineStatus) -> Iterator[Event]:
    """The events of one moment; those of prefix reuse only if it is on."""
    yield EngineSample(
        model=model,
        activity=activity,
        running=status.running,
        waiting=status.waiting,
        kv_bytes_used=status.kv_bytes_used,
        kv_bytes_reserved=status.kv_bytes_reserved,
        kv_bytes_grant=status.kv_bytes_grant,
        live_arrays=status.live_arrays,
        decode_steps=status.decode_steps,
        prefill_tokens=status.prefill_tokens,
        output_tokens=status.output_tokens,
    )
    if status.prefix is not None:
        yield _prefix_sample(model, status.prefix)
        for tier, stats in status.prefix.tiers.items():
            yield _tier_sample(model, tier, stats, status.prefix.faults.get(tier, 0))


def _prefix_sample(model: str, prefix: PrefixStatus) -> PrefixSample:
    def count(outcome: LookupOutcome) -> int:
        return prefix.outcomes.get(outcome, 0)

    return PrefixSample(
        model=model,
        lookups=sum(prefix.outcomes.values()),
        hits=count("hit"),
        tokens_reused=prefix.tokens_reused,
        waits=prefix.waits,
        parts_unoffered=prefix.parts_unoffered,
        missed_short=count("short"),
        missed_absent=count("absent"),
        missed_window=count("window"),
        missed_cost=count("cost"),
        missed_failed=count("failed"),
    )


def _tier_sample(model: str, tier: str, stats: TierStats, faults: int) -> TierSample:
    """A tier that does not tell its bytes by kind has 0 for each."""
    return TierSample(
        model=model,
        tier=tier,
        parts=stats.parts,
        bytes_used=stats.bytes_used,
        bytes_limit=stats.bytes_limit,
        full_bytes=stats.detail.get("full_bytes", 0),
        window_bytes=stats.detail.get("window_bytes", 0),
        state_bytes=stats.detail.get("state_bytes", 0),
        hits=stats.hits,
        misses=stats.misses,
        offered=stats.offered,
        dropped=stats.dropped,
        evicted=stats.evicted,
        damaged=stats.damaged,
        faults=faults,
    )
