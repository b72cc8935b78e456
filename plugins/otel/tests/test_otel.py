"""Events become spans and metrics under the conventions' names, and nothing else leaves."""

import http.server
import logging
import threading
import time
from pathlib import Path

import opentelemetry.metrics
import opentelemetry.trace
import pytest
from darkbloom_otel import _names as names
from darkbloom_otel import server_routes, telemetry_sinks
from darkbloom_otel._options import OtelOptions, read_options
from darkbloom_otel._sink import OtelSink, open_sink
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.testclient import TestClient

from darkbloom_core.contracts import (
    EngineSample,
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
from darkbloom_core.errors import SettingsError, Unavailable
from darkbloom_core.settings import ServerSettings, Settings

STARTED = 1_700_000_000_000_000_000


def finished(**changes):
    values = {
        "model": "tiny",
        "operation": "chat",
        "request_id": "r-1",
        "trace_parent": None,
        "started_unix_nanoseconds": STARTED,
        "duration_seconds": 2.5,
        "status": 200,
        "error_code": None,
        "finish_reasons": ("stop",),
        "streamed": True,
        "input_tokens": 100,
        "output_tokens": 21,
        "cached_tokens": 64,
        "reasoning_tokens": 5,
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "time_to_first_token_seconds": 0.5,
        "queue_seconds": 0.125,
        "prefill_seconds": 0.25,
        "decode_seconds": 2.0,
    }
    return RequestFinished(**{**values, **changes})


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def sink(exporter):
    sink = OtelSink(
        server_address="127.0.0.1", server_port=8000, span_processors=[SimpleSpanProcessor(exporter)]
    )
    yield sink
    sink.close()


def samples(sink):
    """The exposition as {(name, labels): value}, through Prometheus's own parser."""
    body, content_type = sink.exposition("")
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in parse_text(body.decode())
        for sample in metric.samples
    }


def value(sink, name, **labels):
    """The one sample of this name that has these labels."""
    (found,) = [
        number
        for (sample, given), number in samples(sink).items()
        if sample == name and labels.items() <= dict(given).items()
    ]
    return found


def test_a_finished_request_is_one_span_with_the_conventions_names(sink, exporter):
    sink.emit(RequestStarted(model="tiny", operation="chat"))
    sink.emit(finished())
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat tiny"
    assert span.kind is SpanKind.INTERNAL
    assert span.parent is None
    assert (span.start_time, span.end_time) == (STARTED, STARTED + 2_500_000_000)
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "darkbloom"
    assert span.instrumentation_scope.schema_url == names.SCHEMA_URL
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "darkbloom",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 21,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.reasoning.output_tokens": 5,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "darkbloom.request.id": "r-1",
        "darkbloom.queue_seconds": 0.125,
        "darkbloom.prefill_seconds": 0.25,
        "darkbloom.decode_seconds": 2.0,
    }


def test_what_a_request_did_not_say_is_left_out_of_its_span(sink, exporter):
    sink.emit(
        finished(top_k=None, seed=None, max_tokens=None, time_to_first_token_seconds=None, finish_reasons=())
    )
    (span,) = exporter.get_finished_spans()
    absent = {
        "gen_ai.request.top_k",
        "gen_ai.request.seed",
        "gen_ai.request.max_tokens",
        "gen_ai.request.choice.count",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.response.finish_reasons",
        "error.type",
        "darkbloom.malformed_outputs",
    }
    assert absent.isdisjoint(span.attributes)


def test_several_choices_and_malformed_outputs_are_told(sink, exporter):
    sink.emit(finished(choices=3, malformed_outputs=2, finish_reasons=("stop", "length", "stop")))
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["darkbloom.malformed_outputs"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "length", "stop")
    assert value(sink, "darkbloom_outputs_total", darkbloom_finish_reason="stop") == 2
    assert value(sink, "darkbloom_outputs_total", darkbloom_finish_reason="length") == 1
    assert value(sink, "darkbloom_outputs_malformed_total") == 2


def test_the_callers_trace_is_continued(sink, exporter):
    sink.emit(finished(trace_parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


def test_a_trace_that_the_caller_does_not_sample_is_not_sampled_here(sink, exporter):
    sink.emit(finished(trace_parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"))
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 10_000])
def test_a_malformed_trace_header_begins_a_trace_of_its_own(header, sink, exporter):
    sink.emit(finished(trace_parent=header))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_a_span_never_becomes_a_child_of_what_the_host_process_traces(sink, exporter):
    with sink._tracer.start_as_current_span("of the host"):
        sink.emit(finished())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["chat tiny"].parent is None


def test_a_failed_request_has_its_code_and_an_error_status(sink, exporter):
    sink.emit(finished(status=500, error_code="generation_failed"))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "generation_failed"
    assert value(sink, "gen_ai_server_request_duration_seconds_count", error_type="generation_failed") == 1
    assert not [key for key, _ in samples(sink) if key.startswith("gen_ai_server_time_to_first_token")]


def test_the_conventions_histograms_have_their_values_and_buckets(sink):
    sink.emit(finished())
    request = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "darkbloom",
        "gen_ai_request_model": "tiny",
        "gen_ai_response_model": "tiny",
        "server_address": "127.0.0.1",
        "server_port": "8000",
    }
    assert value(sink, "gen_ai_server_request_duration_seconds_sum", **request) == 2.5
    assert value(sink, "gen_ai_server_time_to_first_token_seconds_sum", **request) == 0.5
    assert value(sink, "gen_ai_server_time_per_output_token_seconds_sum", **request) == pytest.approx(0.1)
    assert value(sink, "gen_ai_server_request_duration_seconds_bucket", le="2.56") == 1
    assert value(sink, "gen_ai_server_request_duration_seconds_bucket", le="1.28") == 0
    assert value(sink, "gen_ai_server_time_per_output_token_seconds_bucket", le="0.002") == 0
    assert value(sink, "darkbloom_request_queue_duration_seconds_sum") == 0.125
    assert value(sink, "darkbloom_request_prefill_duration_seconds_sum") == 0.25
    assert value(sink, "darkbloom_request_decode_duration_seconds_sum") == 2.0


@pytest.mark.parametrize("event", [finished(output_tokens=1), finished(choices=2)])
def test_time_per_output_token_needs_one_output_of_more_than_one_token(event, sink):
    sink.emit(event)
    assert not [key for key, _ in samples(sink) if key.startswith("gen_ai_server_time_per_output_token")]


def test_tokens_and_requests_in_flight_are_counted(sink):
    for _ in range(3):
        sink.emit(RequestStarted(model="tiny", operation="chat"))
    sink.emit(finished())
    sink.emit(finished())
    assert value(sink, "darkbloom_requests_active") == 1
    assert value(sink, "darkbloom_tokens_input_total") == 200
    assert value(sink, "darkbloom_tokens_input_cached_total") == 128
    assert value(sink, "darkbloom_tokens_output_total") == 42
    assert value(sink, "darkbloom_tokens_output_reasoning_total") == 10


def test_the_engines_last_sample_is_shown_until_its_model_is_gone(sink):
    sample = {
        "activity": "running", "running": 3, "waiting": 2, "kv_bytes_used": 10, "kv_bytes_reserved": 20, "kv_bytes_grant": 30,
        "live_arrays": 35,
        "decode_steps": 40, "prefill_tokens": 50, "output_tokens": 60,
    }  # fmt: skip
    sink.emit(SlotChanged(model="tiny", family="f", state="serving", seconds=1.0))
    sink.emit(EngineSample(model="tiny", **{**sample, "running": 1}))
    sink.emit(EngineSample(model="tiny", **sample))
    model = {"gen_ai_request_model": "tiny"}
    for name, number in {
        "darkbloom_sequences_running": 3,
        "darkbloom_sequences_waiting": 2,
        "darkbloom_kv_used_bytes": 10,
        "darkbloom_kv_reserved_bytes": 20,
        "darkbloom_kv_grant_bytes": 30,
        "darkbloom_arrays": 35,
        "darkbloom_engine_decode_steps_total": 40,
        "darkbloom_engine_prefill_tokens_total": 50,
        "darkbloom_engine_output_tokens_total": 60,
    }.items():
        assert value(sink, name, **model) == number
    assert value(sink, "darkbloom_slots", darkbloom_slot_state="serving", darkbloom_family="f", **model) == 1
    assert value(sink, "darkbloom_slots_activity", darkbloom_slot_activity="running", **model) == 1
    sink.emit(SlotChanged(model="tiny", family="f", state="absent", seconds=1.0))
    assert not [
        key
        for key, _ in samples(sink)
        if key.startswith(("darkbloom_sequences", "darkbloom_kv", "darkbloom_arrays", "darkbloom_slots"))
    ]


def test_prefix_reuse_is_shown_by_outcome_tier_and_kind_until_its_model_is_gone(sink):
    misses = {"missed_short": 1, "missed_absent": 2, "missed_window": 3, "missed_cost": 4, "missed_failed": 5}
    sink.emit(
        PrefixSample(
            model="tiny", lookups=22, hits=7, tokens_reused=512, waits=6, parts_unoffered=5, **misses
        )
    )
    tier = {
        "parts": 9, "bytes_used": 60, "bytes_limit": 100, "full_bytes": 10, "window_bytes": 20,
        "state_bytes": 30, "hits": 11, "misses": 12, "offered": 13, "dropped": 14, "evicted": 15,
        "damaged": 1, "faults": 2,
    }  # fmt: skip
    for name in ("ram", "disk"):
        sink.emit(TierSample(model="tiny", tier=name, **tier))
    model = {"gen_ai_request_model": "tiny"}
    outcomes = {"hit": 7, "short": 1, "absent": 2, "window": 3, "cost": 4, "failed": 5}
    for outcome, count in outcomes.items():
        labels = {"darkbloom_prefix_outcome": outcome, **model}
        assert value(sink, "darkbloom_prefix_lookups_total", **labels) == count
    assert value(sink, "darkbloom_prefix_tokens_reused_total", **model) == 512
    assert value(sink, "darkbloom_prefix_waits_total", **model) == 6
    assert value(sink, "darkbloom_prefix_parts_unoffered_total", **model) == 5
    of_disk = {"darkbloom_cache_tier": "disk", **model}
    for part, size in {"full": 10, "window": 20, "state": 30}.items():
        assert value(sink, "darkbloom_cache_bytes", darkbloom_cache_part=part, **of_disk) == size
    for name, number in {
        "limit_bytes": 100, "hits_total": 11, "misses_total": 12, "evictions_total": 15,
        "refusals_total": 14, "faults_total": 3,
    }.items():  # fmt: skip
        assert value(sink, f"darkbloom_cache_{name}", **of_disk) == number
    sink.emit(SlotChanged(model="tiny", family="f", state="absent", seconds=1.0))
    left = [key for key, _ in samples(sink) if key.startswith(("darkbloom_prefix", "darkbloom_cache"))]
    assert not left


def test_refusals_and_failures_are_counted_by_their_cause(sink):
    sink.emit(RequestRefused(status=404, error_code="model_not_found"))
    sink.emit(RequestRefused(status=404, error_code="model_not_found"))
    for code in ("model_does_not_fit", "grant_too_small"):
        sink.emit(SlotChanged(model="m", family="f", state="failed", seconds=0.0, error_code=code))
    memory = {"reservations": 2, "reserved_bytes": 9, "used_bytes": 8, "cached_bytes": 7}
    sink.emit(LedgerStuck(streak_seconds=120.0, system_free_bytes=None, **memory))
    sink.emit(ReservationDropped(kind="kv", age_seconds=601.0, size_bytes=4096))
    for code in ("model_does_not_fit", "grant_too_small"):
        labels = {"gen_ai_request_model": "m", "error_type": code}
        assert value(sink, "darkbloom_slots_failures_total", **labels) == 1
    assert value(sink, "darkbloom_ledger_stuck_total") == 1
    assert value(sink, "darkbloom_ledger_dropped_bytes_total", darkbloom_ledger_kind="kv") == 4096
    sink.emit(RequestRefused(status=400, error_code="invalid_value", media_kind="mixed"))
    sink.emit(PluginFailed(plugin="p", distribution="d", state="failed to import"))
    sink.emit(SinkFailed(sink="other"))
    refused = {"error_type": "model_not_found", "http_response_status_code": "404"}
    assert value(sink, "darkbloom_requests_refused_total", **refused) == 2
    assert value(sink, "darkbloom_requests_refused_total", darkbloom_media_kind="mixed") == 1
    assert value(sink, "darkbloom_plugin_failures_total", darkbloom_plugin_name="p") == 1
    assert value(sink, "darkbloom_sink_failures_total", darkbloom_sink_name="other") == 1


def test_what_a_cache_tier_did_is_a_span_and_is_counted(sink, exporter):
    tier = {"model": "tiny", "tier": "disk", "started_unix_nanoseconds": STARTED, "duration_seconds": 0.5}
    sink.emit(PartsFetched(**tier, parts=4, parts_missing=1, size_bytes=3000))
    sink.emit(PartsWritten(**tier, parts=2, parts_dropped=3, size_bytes=2000))
    fetched, written = exporter.get_finished_spans()
    assert (fetched.name, written.name) == ("fetch disk", "write disk")
    assert fetched.parent is None
    assert fetched.end_time - fetched.start_time == 500_000_000
    assert dict(fetched.attributes) == {
        "gen_ai.request.model": "tiny",
        "darkbloom.cache.tier": "disk",
        "darkbloom.cache.parts": 4,
        "darkbloom.cache.parts_missing": 1,
        "darkbloom.cache.size_bytes": 3000,
    }
    assert written.attributes["darkbloom.cache.parts_dropped"] == 3
    by = {"gen_ai_request_model": "tiny", "darkbloom_cache_tier": "disk"}
    assert value(sink, "darkbloom_cache_fetch_duration_seconds_sum", **by) == 0.5
    assert value(sink, "darkbloom_cache_fetched_bytes_total", **by) == 3000
    assert value(sink, "darkbloom_cache_fetched_parts_total", **by) == 3
    assert value(sink, "darkbloom_cache_missing_parts_total", **by) == 1
    assert value(sink, "darkbloom_cache_written_bytes_total", **by) == 2000
    assert value(sink, "darkbloom_cache_written_parts_total", **by) == 2
    assert value(sink, "darkbloom_cache_dropped_parts_total", **by) == 3


def test_two_sinks_in_one_process_share_nothing_and_touch_nothing_global(sink):
    before = opentelemetry.trace.get_tracer_provider(), opentelemetry.metrics.get_meter_provider()
    other = OtelSink()
    other.emit(finished(model="other"))
    sink.emit(finished())
    models = [
        {dict(labels).get("gen_ai_request_model") for _, labels in samples(each)} for each in (sink, other)
    ]
    assert models == [{None, "tiny"}, {None, "other"}]
    other.close()
    assert value(sink, "darkbloom_tokens_input_total") == 100
    after = opentelemetry.trace.get_tracer_provider(), opentelemetry.metrics.get_meter_provider()
    assert after == before


def test_scrapes_at_once_run_one_after_the_other(sink):
    """The exporter's collections would take metrics from each other."""
    running, most = 0, 0

    class SlowCollector:
        def collect(self):
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.02)
            running -= 1
            return []

    sink._registry.register(SlowCollector())
    threads = [threading.Thread(target=sink.exposition, args=("",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


# --- /metrics ------------------------------------------------------------------------------


@pytest.fixture
def client(sink):
    (route,) = server_routes(Settings())
    app = Starlette(routes=[route])
    app.state.telemetry_sinks = (object(), sink)
    return TestClient(app)


def test_metrics_answers_in_the_format_that_the_scraper_asks_for(client, sink):
    sink.emit(finished())
    plain = client.get("/metrics")
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain; version=")
    wanted = "gen_ai_server_request_duration_seconds"
    assert wanted in {metric.name for metric in parse_text(plain.text)}
    open_metrics = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert wanted in {metric.name for metric in parse_openmetrics(open_metrics.text)}


def test_a_server_without_the_sink_says_so():
    (route,) = server_routes(Settings())
    app = Starlette(routes=[route])
    app.state.telemetry_sinks = ()
    with pytest.raises(Unavailable, match="gave no sink"):
        TestClient(app).get("/metrics")


# --- options and export ----------------------------------------------------------------------


def with_options(**options):
    return Settings(options={"otel": options})


def test_the_endpoint_is_an_option_and_anything_else_is_an_error():
    assert read_options(Settings()) == OtelOptions()
    assert read_options(with_options(endpoint="http://h:1/")) == OtelOptions("http://h:1")
    with pytest.raises(
        SettingsError, match=r"unknown option options\.otel\.endpont: did you mean endpoint\?"
    ):
        telemetry_sinks(with_options(endpont="http://h:1"))
    with pytest.raises(SettingsError, match=r"options\.otel\.endpoint must start with http:// .* not 'h:1'"):
        server_routes(with_options(endpoint="h:1"))


@pytest.fixture
def collector():
    """An HTTP server that keeps what is posted to it."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            """Not on stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_spans_and_metrics_reach_the_collector_that_is_named(by, collector, monkeypatch):
    url, received = collector
    if by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        url = None
    settings = Settings(server=ServerSettings(port=0), options={"otel": {"endpoint": url}} if url else {})
    (sink,) = telemetry_sinks(settings)
    sink.emit(finished())
    sink.close()
    bodies = dict(received)
    assert b"chat tiny" in bodies["/v1/traces"]
    assert b"gen_ai.server.request.duration" in bodies["/v1/metrics"]


def test_without_a_collector_nothing_works_in_the_background(monkeypatch):
    for variable in ("", "TRACES_", "METRICS_"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{variable}ENDPOINT", raising=False)
    before = threading.active_count()
    sink = open_sink(OtelOptions(), "127.0.0.1", 8000)
    sink.emit(finished())
    assert threading.active_count() == before
    sink.close()


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(caplog):
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    sink = open_sink(OtelOptions("http://127.0.0.1:1"), "127.0.0.1", 8000)
    sink.emit(finished())
    started = time.monotonic()
    sink.close()
    assert time.monotonic() - started < 1.9


def test_every_name_that_leaves_is_on_the_telemetry_page():
    page = (Path(__file__).resolve().parents[3] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    no_names = {"SCHEMA_URL", "SCOPE", "PROVIDER"}
    for constant, name in vars(names).items():
        if constant.isupper() and isinstance(name, str) and constant not in no_names:
            assert f"`{name}`" in page, f"docs/telemetry.md does not explain {name}"
