"""The sink: events become spans and metrics of providers that belong to this sink alone."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from darkbloom_core.contracts import Event, PartsFetched, PartsWritten, RequestFinished
from darkbloom_otel import _names as names
from darkbloom_otel._metrics import Metrics
from darkbloom_otel._options import OtelOptions
from darkbloom_otel._spans import record_span, record_tier_span

logger = logging.getLogger("darkbloom.otel")

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
METRICS_VARIABLE = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"

CLOSE_SECONDS = 1.0
"""How long closing waits for a collector that does not answer; a stop of the server must not hang on it."""


class OtelSink:
    """A ``TelemetrySink``. The processors and readers given are closed with it."""

    name = "otel"

    def __init__(
        self,
        *,
        server_address: str | None = None,
        server_port: int | None = None,
        span_processors: Sequence[SpanProcessor] = (),
        metric_readers: Sequence[MetricReader] = (),
    ) -> None:
        self._registry = CollectorRegistry()
        self._scrape_lock = threading.Lock()
        resource = _resource()
        prometheus = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)
        self._meters = MeterProvider([prometheus, *metric_readers], resource, shutdown_on_exit=False)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in span_processors:
            self._tracers.add_span_processor(processor)
        self._server = _server_attributes(server_address, server_port)
        scope_version = version("darkbloom-otel")
        self._tracer = self._tracers.get_tracer(names.SCOPE, scope_version, names.SCHEMA_URL)
        self._metrics = Metrics(
            self._meters.get_meter(names.SCOPE, scope_version, names.SCHEMA_URL), self._server
        )

    def emit(self, event: Event) -> None:
        """Count ``event``, and give it a span if it is something that took its time."""
        self._metrics.record(event)
        if isinstance(event, RequestFinished):
            record_span(self._tracer, event, self._server)
        elif isinstance(event, PartsFetched | PartsWritten):
            record_tier_span(self._tracer, event)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the Prometheus format that the header ``accept`` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        with self._scrape_lock:  # two collections at once would take metrics from each other
            return encode(self._registry), content_type

    def close(self) -> None:
        """Send what is left, for at most ``CLOSE_SECONDS``."""
        closing = threading.Thread(target=self._shutdown, name="darkbloom-otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("the telemetry collector does not answer: the last spans and metrics are lost")

    def _shutdown(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown()


def open_sink(options: OtelOptions, server_address: str, server_port: int) -> OtelSink:
    """A sink that exports to the collector of ``options``, else of the environment, else nowhere."""
    processors: list[SpanProcessor] = []
    readers: list[MetricReader] = []
    if options.endpoint or os.environ.get(ENDPOINT_VARIABLE) or os.environ.get(TRACES_VARIABLE):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # Without an endpoint of ours the exporter reads the environment itself.
        url = f"{options.endpoint}/v1/traces" if options.endpoint else None
        processors.append(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    if options.endpoint or os.environ.get(ENDPOINT_VARIABLE) or os.environ.get(METRICS_VARIABLE):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        url = f"{options.endpoint}/v1/metrics" if options.endpoint else None
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=url)))
    return OtelSink(
        server_address=server_address,
        server_port=server_port,
        span_processors=processors,
        metric_readers=readers,
    )


def _resource() -> Resource:
    """Who is speaking; the standard variables of OpenTelemetry win over our own name."""
    ours = Resource({SERVICE_NAME: "darkbloom", SERVICE_VERSION: version("darkbloom-core")})
    found = Resource.create()
    named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return ours.merge(found) if named else found.merge(ours)


def _server_attributes(address: str | None, port: int | None) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {}
    if address:
        attributes[names.SERVER_ADDRESS] = address
        if port:  # 0 stands for a port that is chosen only when the server starts
            attributes[names.SERVER_PORT] = port
    return attributes
