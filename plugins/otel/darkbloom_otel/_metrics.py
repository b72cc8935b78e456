"""Events as metrics. Rates and times come from requests, levels from the engines' samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
from opentelemetry.util.types import AttributeValue

from darkbloom_core.contracts import (
    EngineSample,
    Event,
    LedgerStuck,
    PartsFetched,
    PartsWritten,
    PluginFailed,
    PrefixSample,
    RequestFinished,
    RequestRefused,
    RequestStarted,
    ReservationDropped,
    SinkFailed,
    SlotChanged,
    TierSample,
)
from darkbloom_otel import _names as names
from darkbloom_otel._reuse import ReuseMetrics


class Metrics:
    """The instruments of one meter. ``server`` are attributes that every measurement of a request gets."""

    def __init__(self, meter: Meter, server: Mapping[str, AttributeValue]) -> None:
        self._server = dict(server)
        self._lock = threading.Lock()
        self._samples: dict[str, EngineSample] = {}
        self._slots: dict[str, SlotChanged] = {}
        self._requests(meter)
        self._failures(meter)
        self._tiers(meter)
        self._levels(meter)
        self._reuse = ReuseMetrics(meter)

    def record(self, event: Event) -> None:
        """Count ``event``."""
        match event:
            case RequestStarted():
                self._active.add(1, _of(event))
            case RequestFinished():
                self._record_finished(event)
            case RequestRefused():
                self._record_refused(event)
            case SlotChanged():
                self._record_slot(event)
            case EngineSample():
                with self._lock:
                    self._samples[event.model] = event
            case PrefixSample() | TierSample():
                self._reuse.record(event)
            case PartsFetched():
                self._record_fetched(event)
            case PartsWritten():
                self._record_written(event)
            case LedgerStuck():
                self._stuck.add(1)
            case ReservationDropped():
                self._dropped.add(event.size_bytes, {names.LEDGER_KIND: event.kind})
            case PluginFailed():
                self._plugins.add(1, {names.PLUGIN: event.plugin, names.PLUGIN_STATE: event.state})
            case SinkFailed():
                self._sinks.add(1, {names.SINK: event.sink})

    def _record_refused(self, event: RequestRefused) -> None:
        labels: dict[str, AttributeValue] = {
            names.ERROR_TYPE: event.error_code,
            names.HTTP_STATUS: event.status,
        }
        if event.media_kind is not None:
            labels[names.MEDIA_KIND] = event.media_kind
        self._refused.add(1, labels)

    def _requests(self, meter: Meter) -> None:
        self._duration = _seconds(meter, names.REQUEST_DURATION, "From a request's arrival to its end")
        self._first_token = _seconds(
            meter,
            names.TIME_TO_FIRST_TOKEN,
            "From a successful request's arrival to its first token",
            names.TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._per_token = _seconds(
            meter,
            names.TIME_PER_OUTPUT_TOKEN,
            "Time per output token after the first, of a successful request",
            names.TIME_PER_OUTPUT_TOKEN_BUCKETS,
        )
        self._queue = _seconds(meter, names.QUEUE_DURATION, "Waiting before prefill")
        self._prefill = _seconds(meter, names.PREFILL_DURATION, "Prefill of a request")
        self._decode = _seconds(meter, names.DECODE_DURATION, "Decoding of a request")
        self._active = meter.create_up_down_counter(
            names.REQUESTS_ACTIVE, "{request}", "Requests that were accepted and have not ended"
        )
        self._outputs = _counter(meter, names.OUTPUTS, "Outputs, by why they ended")
        self._malformed = _counter(meter, names.OUTPUTS_MALFORMED, "Outputs that broke their format")
        self._input = _counter(meter, names.INPUT_TOKENS, "Prompt tokens")
        self._cached = _counter(meter, names.CACHED_INPUT_TOKENS, "Prompt tokens not computed again")
        self._output = _counter(meter, names.OUTPUT_TOKENS, "Output tokens")
        self._reasoning = _counter(meter, names.REASONING_OUTPUT_TOKENS, "Output tokens of reasoning")

    def _failures(self, meter: Meter) -> None:
        self._refused = _counter(meter, names.REQUESTS_REFUSED, "Requests refused, by the error's code")
        self._load_failures = _counter(meter, names.SLOT_FAILURES, "Loads that failed, by the error's code")
        self._stuck = _counter(meter, names.LEDGER_STUCK, "Times that nothing could be reserved for minutes")
        self._dropped = meter.create_counter(names.LEDGER_DROPPED, "By", "Reservations that were nobody's")
        self._plugins = _counter(meter, names.PLUGIN_FAILURES, "Plugins that were refused or failed")
        self._sinks = _counter(meter, names.SINK_FAILURES, "Times that another telemetry sink raised")

    def _tiers(self, meter: Meter) -> None:
        self._fetch = _seconds(meter, names.CACHE_FETCH_DURATION, "Answers of a cache tier")
        self._fetched = meter.create_counter(names.CACHE_FETCHED, "By", "Bytes that came from a cache tier")
        self._fetched_parts = _counter(meter, names.CACHE_FETCHED_PARTS, "Parts that came from a cache tier")
        self._missing_parts = _counter(
            meter, names.CACHE_MISSING_PARTS, "Parts that a cache tier said it had and did not give"
        )
        self._written = meter.create_counter(names.CACHE_WRITTEN, "By", "Bytes written to a cache tier")
        self._written_parts = _counter(meter, names.CACHE_WRITTEN_PARTS, "Parts written to a cache tier")
        self._dropped_parts = _counter(
            meter, names.CACHE_DROPPED_PARTS, "Parts that waited for a cache tier and were not written"
        )

    def _levels(self, meter: Meter) -> None:
        gauges: tuple[tuple[str, str, str, Callable[[EngineSample], int]], ...] = (
            (names.SEQUENCES_RUNNING, "", "Sequences in the batch", lambda sample: sample.running),
            (names.SEQUENCES_WAITING, "", "Sequences in the queue", lambda sample: sample.waiting),
            (names.KV_USED, "By", "KV memory that is written", lambda sample: sample.kv_bytes_used),
            (names.KV_RESERVED, "By", "KV memory that is reserved", lambda sample: sample.kv_bytes_reserved),
            (names.KV_GRANT, "By", "A model's share of KV memory", lambda sample: sample.kv_bytes_grant),
            (names.ARRAYS, "", "Arrays of requests and caches", lambda sample: sample.live_arrays),
        )
        for name, unit, description, read in gauges:
            meter.create_observable_gauge(name, [partial(self._read_samples, read)], unit, description)
        counters: tuple[tuple[str, str, Callable[[EngineSample], int]], ...] = (
            (names.ENGINE_DECODE_STEPS, "Decode steps", lambda sample: sample.decode_steps),
            (names.ENGINE_PREFILL_TOKENS, "Tokens through prefill", lambda sample: sample.prefill_tokens),
            (names.ENGINE_OUTPUT_TOKENS, "Tokens sampled", lambda sample: sample.output_tokens),
        )
        for name, description, read in counters:
            meter.create_observable_counter(name, [partial(self._read_samples, read)], "", description)
        meter.create_observable_gauge(
            names.SLOTS, [self._read_slots], "", "1 for the state that a model's slot is in"
        )
        meter.create_observable_gauge(
            names.SLOT_ACTIVITIES, [self._read_activities], "", "1 for what a model's slot does"
        )

    def _record_finished(self, event: RequestFinished) -> None:
        request = {**_of(event), **self._server}
        failed = {} if event.error_code is None else {names.ERROR_TYPE: event.error_code}
        self._active.add(-1, _of(event))
        self._duration.record(event.duration_seconds, {**request, **failed})
        first_token = event.time_to_first_token_seconds
        if event.error_code is None and first_token is not None:
            self._first_token.record(first_token, request)
            if event.choices == 1 and event.output_tokens > 1:
                later = event.duration_seconds - first_token
                self._per_token.record(later / (event.output_tokens - 1), request)
        model = {names.REQUEST_MODEL: event.model}
        for histogram, seconds in (
            (self._queue, event.queue_seconds),
            (self._prefill, event.prefill_seconds),
            (self._decode, event.decode_seconds),
        ):
            if seconds is not None:
                histogram.record(seconds, model)
        for counter, count in (
            (self._input, event.input_tokens),
            (self._cached, event.cached_tokens),
            (self._output, event.output_tokens),
            (self._reasoning, event.reasoning_tokens),
            (self._malformed, event.malformed_outputs),
        ):
            counter.add(count, model)
        for reason in event.finish_reasons:
            self._outputs.add(1, {**model, names.FINISH_REASON: reason})

    def _record_fetched(self, event: PartsFetched) -> None:
        tier: dict[str, AttributeValue] = {names.REQUEST_MODEL: event.model, names.CACHE_TIER: event.tier}
        self._fetch.record(event.duration_seconds, tier)
        self._fetched.add(event.size_bytes, tier)
        self._fetched_parts.add(event.parts - event.parts_missing, tier)
        self._missing_parts.add(event.parts_missing, tier)

    def _record_written(self, event: PartsWritten) -> None:
        tier: dict[str, AttributeValue] = {names.REQUEST_MODEL: event.model, names.CACHE_TIER: event.tier}
        self._written.add(event.size_bytes, tier)
        self._written_parts.add(event.parts, tier)
        self._dropped_parts.add(event.parts_dropped, tier)

    def _record_slot(self, event: SlotChanged) -> None:
        if event.state == "failed" and event.error_code is not None:
            self._load_failures.add(1, {names.REQUEST_MODEL: event.model, names.ERROR_TYPE: event.error_code})
        with self._lock:
            if event.state == "absent":
                self._slots.pop(event.model, None)
                self._samples.pop(event.model, None)
                self._reuse.forget(event.model)
            else:
                self._slots[event.model] = event

    def _read_samples(
        self, read: Callable[[EngineSample], int], options: CallbackOptions
    ) -> Iterable[Observation]:
        with self._lock:
            samples = list(self._samples.values())
        return [Observation(read(sample), {names.REQUEST_MODEL: sample.model}) for sample in samples]

    def _read_activities(self, options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            samples = list(self._samples.values())
        return [
            Observation(1, {names.REQUEST_MODEL: sample.model, names.SLOT_ACTIVITY: sample.activity})
            for sample in samples
        ]

    def _read_slots(self, options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            slots = list(self._slots.values())
        return [
            Observation(
                1, {names.REQUEST_MODEL: slot.model, names.FAMILY: slot.family, names.SLOT_STATE: slot.state}
            )
            for slot in slots
        ]


def _of(event: RequestStarted | RequestFinished) -> dict[str, AttributeValue]:
    return {
        names.OPERATION_NAME: event.operation,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: event.model,
        names.RESPONSE_MODEL: event.model,
    }


def _counter(meter: Meter, name: str, description: str) -> Counter:
    return meter.create_counter(name, "", description)


def _seconds(
    meter: Meter, name: str, description: str, buckets: tuple[float, ...] = names.DURATION_BUCKETS
) -> Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=buckets)
