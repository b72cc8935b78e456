"""A finished request as one inference span, and a cache tier's work as one, with the times that the event states."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from darkbloom_core.contracts import PartsFetched, PartsWritten, RequestFinished
from darkbloom_otel import _names as names

Attributes = dict[str, AttributeValue]


def record_span(tracer: Tracer, event: RequestFinished, server: Mapping[str, AttributeValue]) -> None:
    """Start and end the span of ``event``, as a child of the span that its trace header names."""
    start = event.started_unix_nanoseconds
    span = tracer.start_span(
        f"{event.operation} {event.model}",
        context=_parent(event.trace_parent),
        kind=SpanKind.INTERNAL,  # the model runs in this process
        attributes={**request_attributes(event), **server},
        start_time=start,
    )
    if event.error_code is not None:
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_time=start + int(event.duration_seconds * 1e9))


def record_tier_span(tracer: Tracer, event: PartsFetched | PartsWritten) -> None:
    """Start and end the span of a tier's work, which belongs to no request alone."""
    is_fetch = isinstance(event, PartsFetched)
    attributes: Attributes = {
        names.REQUEST_MODEL: event.model,
        names.CACHE_TIER: event.tier,
        names.CACHE_PARTS: event.parts,
        names.CACHE_SIZE: event.size_bytes,
    }
    if isinstance(event, PartsFetched) and event.parts_missing:
        attributes[names.CACHE_PARTS_MISSING] = event.parts_missing
    if isinstance(event, PartsWritten) and event.parts_dropped:
        attributes[names.CACHE_PARTS_DROPPED] = event.parts_dropped
    start = event.started_unix_nanoseconds
    span = tracer.start_span(
        f"{'fetch' if is_fetch else 'write'} {event.tier}",
        context=Context(),
        kind=SpanKind.INTERNAL,
        attributes=attributes,
        start_time=start,
    )
    span.end(end_time=start + int(event.duration_seconds * 1e9))


def request_attributes(event: RequestFinished) -> Attributes:
    """All that the event says, under the conventions' names; what it does not say is left out."""
    attributes: dict[str, AttributeValue | None] = {
        names.OPERATION_NAME: event.operation,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: event.model,
        names.RESPONSE_MODEL: event.model,
        names.REQUEST_MAX_TOKENS: event.max_tokens,
        names.REQUEST_TEMPERATURE: event.temperature,
        names.REQUEST_TOP_P: event.top_p,
        names.REQUEST_TOP_K: event.top_k,
        names.REQUEST_SEED: event.seed,
        names.REQUEST_STREAM: event.streamed,
        names.REQUEST_CHOICE_COUNT: event.choices if event.choices != 1 else None,
        names.RESPONSE_FINISH_REASONS: event.finish_reasons or None,
        names.RESPONSE_TIME_TO_FIRST_CHUNK: event.time_to_first_token_seconds,
        names.USAGE_INPUT_TOKENS: event.input_tokens,
        names.USAGE_OUTPUT_TOKENS: event.output_tokens,
        names.USAGE_CACHE_READ_INPUT_TOKENS: event.cached_tokens,
        names.USAGE_REASONING_OUTPUT_TOKENS: event.reasoning_tokens,
        names.ERROR_TYPE: event.error_code,
        names.HTTP_STATUS: event.status,
        names.REQUEST_ID: event.request_id,
        names.QUEUE_SECONDS: event.queue_seconds,
        names.PREFILL_SECONDS: event.prefill_seconds,
        names.DECODE_SECONDS: event.decode_seconds,
        names.MALFORMED_OUTPUTS: event.malformed_outputs or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _parent(trace_parent: str | None) -> Context:
    """The caller's span; an empty context, never this thread's, if there is none or it is malformed."""
    carrier = {} if trace_parent is None else {"traceparent": trace_parent}
    return TraceContextTextMapPropagator().extract(carrier)
