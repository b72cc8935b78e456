"""How the server behaves while it works: clients that leave, full queues, telemetry, health, stopping.

Beside it: a client that leaves while its prompt is written, and in how few steps its row is
free, in test_server_generation; while pictures are read, in test_media_conduct; hundreds that
are killed, in test_soak_clients; signals to a process, in test_server_run; the status of each
error, in test_server_errors; bodies, ids and their bounds, in test_server_edge and
test_server_live; what no error repeats, in the dialects' test_dialects_conduct; the shape of
streams, in test_server_answer; keys, their limits and pages of browsers, in test_server_keys,
test_server_limits and test_server_pages.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from connections import open_request, stop_in_background
from starlette.routing import Route
from toy_server import ToyFamily, ToyServer

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted
from darkbloom_core.plugins import PluginReport

MESSAGES = [{"role": "user", "content": "HELLO"}]
REQUEST_EVENTS = (RequestStarted, RequestFinished, RequestRefused)


def body(model, **fields) -> dict:
    return {"model": model, "messages": MESSAGES, **fields}


def post(server, **fields):
    return httpx.post(f"{server.url}/v1/chat/completions", json=body(**fields), timeout=30)


def wait_for(condition, seconds=5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def finished(server) -> RequestFinished:
    """The one account of the one request since the last time."""
    wait_for(lambda: any(isinstance(event, RequestFinished) for event in server.sink.events))
    started, ended = server.sink.take(*REQUEST_EVENTS)
    assert isinstance(started, RequestStarted)
    assert isinstance(ended, RequestFinished)
    assert (started.model, started.operation) == (ended.model, ended.operation)
    return ended


@pytest.fixture
def server(toy_server):
    toy_server.wait_until_idle(2)
    toy_server.sink.take()
    return toy_server


# --- clients that leave ---------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_tokens_come_frees_its_row_at_once(server, stream) -> None:
    connection = open_request(server, body("toy/slow", stream=stream, max_tokens=3000, temperature=0))
    wait_for(lambda: server.engine("toy/slow").status().running == 1)
    time.sleep(0.2)
    connection.close()
    server.wait_until_idle(2)
    account = finished(server)
    assert (account.status, account.error_code, account.finish_reasons) == (499, "cancelled", ("cancelled",))
    assert account.input_tokens == 11
    assert 0 < account.output_tokens < 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_prefill_frees_its_row(server, stream) -> None:
    prompt = [{"role": "user", "content": "X" * 4000}]
    request = {"model": "toy/slow", "messages": prompt, "stream": stream, "max_tokens": 5}
    connection = open_request(server, request)
    wait_for(lambda: server.engine("toy/slow").status().running == 1)
    connection.close()
    server.wait_until_idle(2)
    assert finished(server).output_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_is_forgotten(server, stream) -> None:
    running = [open_request(server, body("toy/slow", max_tokens=3000)) for _ in range(8)]
    wait_for(lambda: server.engine("toy/slow").status().running == 8)
    waiting = open_request(server, body("toy/slow", max_tokens=3000, stream=stream))
    wait_for(lambda: server.engine("toy/slow").status().waiting == 1)
    waiting.close()
    wait_for(lambda: server.engine("toy/slow").status().waiting == 0, 1.0)
    assert server.engine("toy/slow").status().running == 8
    for connection in running:
        connection.close()
    server.wait_until_idle(2)


def test_a_client_that_leaves_before_its_body_has_come_is_no_fault_of_the_server(server, caplog) -> None:
    with socket.create_connection(("127.0.0.1", server.background.port), timeout=10) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head + b'{"model"')
        time.sleep(0.05)
    wait_for(lambda: any(isinstance(event, RequestRefused) for event in server.sink.events))
    assert server.sink.take(*REQUEST_EVENTS) == [RequestRefused(status=499, error_code="cancelled")]
    assert caplog.messages == []


def test_all_choices_end_with_their_client(server) -> None:
    connection = open_request(server, body("toy/slow", n=4, max_tokens=3000, stream=True))
    wait_for(lambda: server.engine("toy/slow").status().running == 4)
    connection.close()
    server.wait_until_idle(2)
    assert finished(server).choices == 4


def test_a_client_that_does_not_read_holds_nobody_else_up(server) -> None:
    """It takes so little that its row pauses; others go on, and once it leaves the row is free."""
    request = body("toy/plain", stream=True, max_tokens=4000, n=2, logit_bias={"33": 100})
    with open_request(server, request, receive_bytes=4096):
        answer = post(server, model="toy/plain", max_tokens=20)
        assert answer.json()["usage"]["completion_tokens"] == 20
    server.wait_until_idle(2)
    account = server.sink.take(RequestFinished)[-1]
    assert (account.status, account.choices) == (499, 2)


# --- telemetry --------------------------------------------------------------------------


def test_a_request_is_accounted_for_once(server) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "mine", "traceparent": parent}
    request = body("toy/plain", max_tokens=10, seed=3, temperature=0.5, top_p=0.9, top_k=5)
    before = time.time_ns()
    httpx.post(f"{server.url}/v1/chat/completions", json=request, headers=headers)
    account = finished(server)
    assert (account.model, account.operation, account.request_id) == ("toy/plain", "chat", "mine")
    assert (account.trace_parent, account.streamed, account.choices) == (parent, False, 1)
    assert (account.status, account.error_code, account.finish_reasons) == (200, None, ("length",))
    assert (account.input_tokens, account.output_tokens, account.cached_tokens) == (11, 10, 0)
    assert (account.max_tokens, account.seed) == (10, 3)
    assert (account.temperature, account.top_p, account.top_k) == (0.5, 0.9, 5)
    assert before <= account.started_unix_nanoseconds <= time.time_ns()
    assert 0 < account.time_to_first_token_seconds < account.duration_seconds
    assert account.queue_seconds is not None
    assert account.prefill_seconds + account.decode_seconds < account.duration_seconds


def test_a_stream_is_accounted_for_once(server) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body("toy/plain", stream=True, max_tokens=10, n=2)
    ) as answer:
        answer.read()
    account = finished(server)
    assert (account.streamed, account.choices, account.output_tokens) == (True, 2, 20)
    assert account.finish_reasons == ("length", "length")


def test_a_failure_is_accounted_for_once(server) -> None:
    for stream in (False, True):
        post(server, model="toy/broken", logit_bias={"33": 100}, temperature=0, stream=stream)
        account = finished(server)
        assert (account.status, account.error_code) == (500, "generation_failed")
        assert account.finish_reasons == ("error",)


def test_a_trace_parent_that_is_none_is_dropped(server) -> None:
    url = f"{server.url}/v1/chat/completions"
    httpx.post(url, json=body("toy/plain", max_tokens=1), headers={"traceparent": "a secret"})
    assert finished(server).trace_parent is None


def test_outputs_that_call_or_break_their_format_are_counted(server) -> None:
    call_then_end = {"logit_bias": {"62": 100}, "temperature": 0, "max_tokens": 3}
    assert post(server, model="toy/plain", **call_then_end).json()["choices"][0]["message"]["tool_calls"]
    assert finished(server).malformed_outputs == 0
    post(server, model="toy/plain", logit_bias={"63": 100}, temperature=0, max_tokens=5, n=2)
    assert finished(server).malformed_outputs == 2


def test_no_event_holds_text(server) -> None:
    secret = "MYSECRET"
    post(server, model="toy/plain", messages=[{"role": "user", "content": secret}], max_tokens=2, user=secret)
    post(server, model=secret)
    post(server, model="toy/plain", messages=[{"role": secret}])
    assert secret not in repr(server.sink.take(*REQUEST_EVENTS))


# --- capacity ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two rows, one waiting place, and KV memory for about 300 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    tables = {"engine": {"max_rows": 2, "waiting_limit": 1}, "memory": {"kv_bytes": 80_000}}
    with ToyServer(folder, {"toy": {"seconds": 0.005}}, **tables).running() as server:
        yield server


def test_a_full_queue_is_429_and_says_when_to_come_back(tiny) -> None:
    held = [open_request(tiny, body("toy", max_tokens=100)) for _ in range(3)]
    wait_for(lambda: sum((lambda s: (s.running, s.waiting))(tiny.engine("toy").status())) == 3)
    answer = post(tiny, model="toy", max_tokens=5)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    tiny.wait_until_idle(2)


def test_a_request_that_gets_nowhere_is_504(tmp_path) -> None:
    tables = {"engine": {"max_rows": 1, "progress_seconds": 0.5}}
    with ToyServer(tmp_path, {"toy": {"seconds": 0.02}}, **tables).running() as server:
        running = open_request(server, body("toy", max_tokens=3000))
        wait_for(lambda: server.engine("toy").status().running == 1)
        answer = post(server, model="toy", max_tokens=5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        running.close()
        server.wait_until_idle(2)


def test_choices_that_do_not_all_fit_leave_none_behind(tiny) -> None:
    answer = post(tiny, model="toy", max_tokens=5, n=4)
    assert answer.status_code == 429
    tiny.wait_until_idle(2)
    assert post(tiny, model="toy", max_tokens=5, n=3).status_code == 200


def test_what_can_never_fit_is_400(tiny) -> None:
    answer = post(tiny, model="toy", max_tokens=4000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
    tiny.wait_until_idle(2)


def test_a_client_that_asks_for_no_limit_gets_what_fits(tiny) -> None:
    tiny.sink.take()
    with contextlib.closing(open_request(tiny, body("toy", stream=True))) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    tiny.wait_until_idle(2)
    assert 64 <= finished(tiny).max_tokens < 600


def test_capacity_is_the_worst_case_that_was_promised_and_what_admission_goes_by(tiny) -> None:
    def capacity():
        answer = httpx.get(f"{tiny.url}/v1/capacity").json()
        assert (answer["object"], answer["status"]) == ("capacity", "ready")
        (slot,) = answer["slots"]
        return slot

    idle, slot = capacity(), tiny.slots.get("toy")
    assert (idle["model"], idle["activity"], idle["running"], idle["waiting"]) == ("toy", "idle", 0, 0)
    assert (idle["max_rows"], idle["committed_tokens"], idle["active_tokens"]) == (2, 0, 0)
    assert idle["kv_bytes_per_token"] == slot.description.kv_bytes_per_token > 0
    assert idle["token_budget"] == (slot.grant_bytes - slot.slab_bytes) // idle["kv_bytes_per_token"] > 0
    assert idle["load_seconds"] > 0
    held = [open_request(tiny, body("toy", max_tokens=100)) for _ in range(3)]
    wait_for(lambda: (capacity()["running"], capacity()["waiting"]) == (2, 1))
    busy = capacity()
    assert (busy["activity"], busy["committed_tokens"]) == ("running", 3 * (11 + 100))
    assert busy["token_budget"] == idle["token_budget"]
    for connection in held:
        connection.close()
    tiny.wait_until_idle(2)
    assert post(tiny, model="toy", max_tokens=5).status_code == 200
    assert capacity()["decode_rate"] > 0
    assert capacity()["committed_tokens"] == 0


# --- health -----------------------------------------------------------------------------


def test_health_tells_which_slots_serve(server) -> None:
    assert httpx.get(f"{server.url}/health/live").json() == {"status": "live"}
    answer = httpx.get(f"{server.url}/health/ready")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"
    assert answer.json()["slots"][0] == {
        "model": "toy/broken",
        "state": "serving",
        "activity": "idle",
        "healthy": True,
        "running": 0,
        "waiting": 0,
    }
    assert answer.json()["failed_plugins"] == answer.json()["failed_sinks"] == []


def test_a_server_whose_only_engine_hangs_in_a_step_is_not_ready_until_it_returns(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("darkbloom_core.engine._liveness.STEP_SECONDS", 0.03)
    with (
        ToyServer(tmp_path, {"toy": {"seconds": 0.1}}).running() as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/health/ready").status_code == 200
        with open_request(server, body("toy", max_tokens=1)):
            wait_for(lambda: client.get("/health/ready").status_code == 503)
            assert client.get("/health/ready").json()["slots"][0]["healthy"] is False
            assert client.get("/health/live").status_code == 200
        wait_for(lambda: client.get("/health/ready").status_code == 200)


class RaisingSink:
    name = "raising"

    def emit(self, event):
        raise OSError("no disk")

    def close(self):
        pass


def test_health_names_what_failed(tmp_path) -> None:
    def report(name, state):
        return PluginReport(name=name, distribution="d", version="1", hooks=(), state=state, reason="why")

    reports = [report("good", "loaded"), report("off", "blocked"), report("bad", "failed to import")]
    with ToyServer(
        tmp_path, {"toy": {}}, sinks=[RaisingSink()], plugin_reports=lambda: reports
    ).running() as server:
        assert post(server, model="toy", max_tokens=2).status_code == 200
        health = httpx.get(f"{server.url}/health/ready")
    assert health.status_code == 200
    assert health.json()["failed_plugins"] == [
        {"name": "bad", "distribution": "d", "state": "failed to import", "reason": "why"}
    ]
    (sink,) = health.json()["failed_sinks"]
    assert sink["name"] == "raising"
    assert sink["failures"] >= 2


def test_a_server_without_a_model_is_live_but_not_ready(tmp_path) -> None:
    with ToyServer(tmp_path, {}).running() as server:
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
        assert httpx.get(f"{server.url}/v1/models").json()["data"] == []
        assert post(server, model="toy").status_code == 404


# --- stopping ---------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path):
    with ToyServer(tmp_path, {"toy": {"seconds": 0.02}}).running() as server:
        yield server


def test_draining_lets_running_streams_end_and_takes_nothing_new(own_server) -> None:
    with httpx.stream(
        "POST",
        f"{own_server.url}/v1/chat/completions",
        json=body("toy", stream=True, max_tokens=40),
        timeout=30,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        stopping = stop_in_background(own_server, 30)
        wait_for(lambda: httpx.get(f"{own_server.url}/health/ready").status_code == 503)
        assert httpx.get(f"{own_server.url}/health/ready").json()["status"] == "draining"
        refused = post(own_server, model="toy", max_tokens=5)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert [line for line in lines if line][-1] == "data: [DONE]"
    stopping.join(5)
    assert not stopping.is_alive()


@pytest.fixture
def late(own_server, tmp_path, monkeypatch):
    """A model that loads as long as the test likes: whether it has begun, and the word that it may end."""
    load, begun, may_end = ToyFamily.load, threading.Event(), threading.Event()

    def load_slowly(self, *arguments, **fields):
        begun.set()
        assert may_end.wait(20)
        return load(self, *arguments, **fields)

    monkeypatch.setattr(ToyFamily, "load", load_slowly)
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "config.json").write_text('{"model_type": "toy"}')
    own_server.slots.add("late", tmp_path / "late")
    yield begun, may_end
    may_end.set()


def test_a_client_that_leaves_while_its_model_loads_is_forgotten_and_the_load_goes_on(
    own_server, late
) -> None:
    begun, may_end = late
    connection = open_request(own_server, body("late"))
    assert begun.wait(10)
    connection.close()
    wait_for(lambda: any(isinstance(event, RequestRefused) for event in own_server.sink.events))
    assert own_server.sink.take(*REQUEST_EVENTS) == [RequestRefused(status=499, error_code="cancelled")]
    may_end.set()
    assert post(own_server, model="late", max_tokens=3).status_code == 200


def test_who_waits_for_a_model_is_told_at_once_that_the_server_stops(own_server, late) -> None:
    begun, _ = late
    answers = []
    asking = threading.Thread(target=lambda: answers.append(post(own_server, model="late")))
    asking.start()
    assert begun.wait(10)
    stopping = stop_in_background(own_server, 0)
    asking.join(10)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
    stopping.join(10)


@pytest.mark.parametrize("drain_seconds", [0, 0.3])
def test_when_the_time_is_over_streams_are_told_and_end(own_server, drain_seconds) -> None:
    with httpx.stream(
        "POST",
        f"{own_server.url}/v1/chat/completions",
        json=body("toy", stream=True, max_tokens=3000),
        timeout=30,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        stopping = stop_in_background(own_server, drain_seconds)
        last = [line for line in lines if line][-1]
    stopping.join(15)
    assert drain_seconds <= time.monotonic() - began < drain_seconds + 10
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    account = own_server.sink.take(RequestFinished)
    assert [(each.status, each.error_code) for each in account] == [(503, "draining")]


def test_a_whole_answer_that_is_cut_by_the_end_is_503(own_server) -> None:
    answers = []
    asking = threading.Thread(target=lambda: answers.append(post(own_server, model="toy", max_tokens=3000)))
    asking.start()
    wait_for(lambda: own_server.engine("toy").status().running == 1)
    own_server.background.stop()
    asking.join(5)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")


def test_what_still_runs_when_the_time_is_over_is_told_so(tmp_path) -> None:
    begun = threading.Event()

    async def endless(request):
        begun.set()
        await asyncio.sleep(60)

    answers = []
    with ToyServer(tmp_path, {}, plugin_routes=[Route("/endless", endless)]).running() as server:
        asking = threading.Thread(
            target=lambda: answers.append(httpx.get(f"{server.url}/endless", timeout=30))
        )
        asking.start()
        assert begun.wait(10)
    asking.join(5)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
    assert answers[0].headers["retry-after"]
    assert server.sink.take(RequestRefused) == [RequestRefused(status=503, error_code="draining")]


def test_stopping_twice_is_stopping_once(own_server) -> None:
    own_server.background.stop()
    own_server.background.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own_server.url}/health/live")
