"""Telemetry from end to end: a real server, the OpenTelemetry plugin, and a real Prometheus that scrapes it."""

import shutil
import socket
import subprocess
import time

import httpx
import pytest
from darkbloom_otel import server_routes
from darkbloom_otel._sink import OtelSink
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from toy_server import ToyServer

from darkbloom_core.settings import Settings

QUESTION = "What is the capital of France?"


class BrokenSink:
    name = "broken"

    def emit(self, event):
        raise RuntimeError("the sink is full")

    def close(self):
        """Nothing to close."""


def metrics(url):
    """What ``/metrics`` says: {(name, labels): value}."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(samples, name, **labels):
    return sum(
        value
        for (sample, given), value in samples.items()
        if sample == name and labels.items() <= dict(given).items()
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A server with toy models, our sink beside a broken one, and the spans that were made."""
    spans = InMemorySpanExporter()
    sink = OtelSink(span_processors=[SimpleSpanProcessor(spans)])
    server = ToyServer(
        tmp_path_factory.mktemp("toys"),
        {"toy/plain": {}},
        sinks=[BrokenSink(), sink],
        plugin_routes=server_routes(Settings()),
    )
    with server.running():
        yield server, spans


def test_a_request_is_one_span_of_its_callers_trace_and_is_counted(observed):
    server, spans = observed
    spans.clear()
    before = metrics(server.url)
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "toy/plain", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
        headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    )
    usage = answer.json()["usage"]
    deadline = time.monotonic() + 5  # the account of a request is written just after its answer
    while not spans.get_finished_spans() and time.monotonic() < deadline:
        time.sleep(0.005)
    (span,) = spans.get_finished_spans()
    assert span.name == "chat toy/plain"
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert span.attributes["darkbloom.request.id"] == answer.headers["x-request-id"]
    after = metrics(server.url)
    for name, count in {
        "gen_ai_server_request_duration_seconds_count": 1,
        "darkbloom_tokens_input_total": usage["prompt_tokens"],
        "darkbloom_tokens_output_total": usage["completion_tokens"],
        "darkbloom_requests_active": 0,
    }.items():
        assert total(after, name) - total(before, name) == count, name


def test_a_refusal_is_counted_by_its_code_and_makes_no_span(observed):
    server, spans = observed
    spans.clear()
    assert (
        httpx.post(f"{server.url}/v1/chat/completions", json={"model": "nobody", "messages": []}).status_code
        >= 400
    )
    assert total(metrics(server.url), "darkbloom_requests_refused_total") >= 1
    assert spans.get_finished_spans() == ()


def test_a_broken_sink_is_seen_in_metrics_and_health_and_fails_no_request(observed):
    server, _ = observed
    assert total(metrics(server.url), "darkbloom_sink_failures_total", darkbloom_sink_name="broken") >= 1
    ready = httpx.get(f"{server.url}/health/ready")
    assert ready.status_code == 200
    (failed,) = ready.json()["failed_sinks"]
    assert failed["name"] == "broken"
    assert failed["failures"] >= 1


def test_metrics_are_not_served_unless_the_plugin_is_named(serve, process_environment):
    process_environment["DARKBLOOM_SERVER__ROUTE_PLUGINS"] = ""
    assert serve("demo/gpt-oss").get("/metrics").status_code == 404


def test_a_plugin_that_is_named_but_not_there_stops_the_server_with_one_line(
    run_darkbloom, process_environment
):
    process_environment["DARKBLOOM_SERVER__ROUTE_PLUGINS"] = "otl"
    done = run_darkbloom("serve", "demo/gpt-oss", code=2)
    assert "server.route_plugins names otl" in done.stderr
    assert "did you mean otel?" in done.stderr


@pytest.fixture
def prometheus(tmp_path):
    """Start Prometheus with one server to scrape, every second; gives its URL."""
    running = []

    def start(target):
        program = shutil.which("prometheus")
        assert program, "this test needs Prometheus: apt-get install prometheus (.ci/run does that)"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: darkbloom, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [
            program,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (tmp_path / "prometheus.log").open("w") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.terminate()
        process.wait(20)


def query(url, expression, seconds=60):
    """The value that Prometheus computes, as soon as there is one; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": expression})
            if answer.status_code == 200 and (result := answer.json()["data"]["result"]):
                return float(result[0]["value"][1])
        except httpx.TransportError:  # it is still starting
            pass
        time.sleep(0.3)
    raise AssertionError(f"Prometheus has no value for {expression} after {seconds} s")


@pytest.mark.system
def test_prometheus_scrapes_a_running_server(serve, prometheus, process_environment):
    process_environment["DARKBLOOM_SERVER__ROUTE_PLUGINS"] = "otel"
    process_environment["DARKBLOOM_TELEMETRY__SAMPLE_SECONDS"] = "0.2"
    serving = serve("demo/gpt-oss")
    for _ in range(3):
        assert "Paris" in serving.ask("demo/gpt-oss", QUESTION)
    assert serving.get("/v1/nowhere").status_code == 404
    url = prometheus(serving.url.removeprefix("http://"))
    assert query(url, 'up{job="darkbloom"} == 1') == 1
    assert (
        query(url, 'gen_ai_server_request_duration_seconds_count{gen_ai_request_model="demo/gpt-oss"}') == 3
    )
    assert query(url, "darkbloom_tokens_output_total") > 3
    assert query(url, 'darkbloom_requests_refused_total{error_type="route_not_found"}') == 1
    assert query(url, 'darkbloom_slots{darkbloom_slot_state="serving"}') == 1
    assert query(url, "darkbloom_kv_grant_bytes") > 0
    assert query(url, "darkbloom_sequences_running") == 0
    quantile = "histogram_quantile(0.9, gen_ai_server_time_to_first_token_seconds_bucket)"
    assert 0 < query(url, quantile) < 10
    assert serving.stop() == 0


@pytest.mark.system
def test_the_exposition_passes_the_linter_of_prometheus(serve, process_environment):
    process_environment["DARKBLOOM_SERVER__ROUTE_PLUGINS"] = "otel"
    process_environment["DARKBLOOM_TELEMETRY__SAMPLE_SECONDS"] = "0.1"
    program = shutil.which("promtool")
    assert program, "this test needs promtool: apt-get install prometheus (.ci/run does that)"
    serving = serve("demo/gpt-oss")
    serving.ask("demo/gpt-oss", QUESTION)
    done = subprocess.run(
        [program, "check", "metrics"], input=serving.get("/metrics").text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
