"""The server while it reads pictures: who waits, who leaves, what is held and given back, and whom a fault touches."""

import threading

import httpx
import pytest
from connections import open_request, stop_in_background
from media_files import data_uri, flat_png, long_gif, numbered_frames, video_file
from toy_engine import wait_for
from toy_seeing import WHICH_FAIL, SeeingFamily, grey
from toy_server import ToyServer

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted

EVENTS = (RequestStarted, RequestFinished, RequestRefused)


def start(folder, media=(), model=()):
    tables = {"media": {"workers": 2, "waiting_limit": 1, **dict(media)}}
    models = {"toy": {"sees": True, **dict(model)}, "blind": {}}
    return ToyServer(folder, models, family=SeeingFamily, **tables).running()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with start(tmp_path_factory.mktemp("seeing"), model={"seconds": 0.002}) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.wait_until_idle(5)
    shared.sink.take()
    yield shared
    seam(shared).gate.set()


def seam(server):
    return server.engine("toy").vision


def part(uri, kind="image"):
    return {"type": f"{kind}_url", f"{kind}_url": {"url": uri}}


def body(*uris, kind="image", model="toy", **fields):
    content = [*(part(uri, kind) for uri in uris), {"type": "text", "text": "WHAT?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def post(server, *uris, **fields):
    """Without ``verify`` the client reads no certificates, which takes longer than most requests here."""
    return httpx.post(
        f"{server.url}/v1/chat/completions", json=body(*uris, **fields), timeout=30, verify=False
    )


def held(server):
    """The kinds of media reservations: the work's own and its result's."""
    table = server.slots.memory.ledger.reservations()
    return sorted(
        "result" if key.endswith("prepared") else "work" for key, one in table.items() if one.kind == "media"
    )


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def fault(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


# --- what is held, and until when --------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_pictures_are_read_only_asks_for_an_end(server, stream):
    """What is reserved stays until the work itself unwinds, and the request is told once."""
    seam(server).shut()
    connection = open_request(server, body(grey(1), grey(2), stream=stream))
    assert seam(server).entered.wait(10)
    assert held(server) == ["result", "work"]
    connection.close()
    wait_for(lambda: server.sink.events)
    assert server.sink.take(*EVENTS) == [
        RequestRefused(status=499, error_code="cancelled", media_kind="image")
    ]
    assert held(server) == ["result", "work"]
    seam(server).gate.set()
    server.wait_until_idle(5)
    assert held(server) == []
    assert server.sink.take(*EVENTS) == []


def test_the_work_is_given_back_before_the_engine_has_the_request_and_the_result_with_its_end(server):
    """The engine reserves for its own tokens alone; nothing is charged twice."""
    seen_at_submit = []
    engine, submit = server.engine("toy"), server.engine("toy").submit

    def noted(request):
        table = server.slots.memory.ledger.reservations()
        seen_at_submit.append(
            (held(server), sum(one.size_bytes for one in table.values() if one.kind == "media"))
        )
        return submit(request)

    engine.submit = noted
    try:
        connection = open_request(server, body(grey(1), stream=True, max_tokens=3000))
        wait_for(lambda: engine.status().running == 1)
    finally:
        del engine.submit
    assert seen_at_submit == [(["result"], 8 * 4)]  # four soft tokens of 8 bytes
    assert held(server) == ["result"]
    connection.close()
    server.wait_until_idle(5)
    assert held(server) == []


def ends(server):
    """Every way out, with the status that it has."""
    yield 200, lambda: post(server, grey(1))
    yield 200, lambda: post(server, grey(1), n=3)
    yield 400, lambda: post(server, grey(1), grey(2)[:-9])
    yield 400, lambda: post(server, grey(1), "http://127.0.0.1:1/x.png")
    yield 400, lambda: post(server, grey(1), max_tokens=1_000_000)
    yield 400, lambda: post(server, grey(1), response_format={"type": "json_schema"})
    yield 400, lambda: post(server, *[grey(1, 64, 64)] * 350)
    for failing in WHICH_FAIL.values():
        yield 500, lambda failing=failing: post(server, grey(1), grey(failing))
    yield 400, lambda: post(server, grey(1), model="blind")


def test_everything_is_given_back_whichever_way_a_request_ends(server):
    for status, ask in ends(server):
        assert ask().status_code == status
        server.wait_until_idle(5)
        assert held(server) == []


def test_without_memory_a_request_is_refused_for_now_and_others_go_on(server, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(server.slots.memory.ledger, "_headroom", lambda pool: 1_000_000)
        refused = post(server, grey(1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "capacity_exhausted")
    assert int(refused.headers["retry-after"]) >= 1
    assert "not free now" in refused.json()["error"]["message"]
    assert held(server) == []
    assert said(post(server, grey(1)))


# --- others ------------------------------------------------------------------------------


def test_requests_that_fail_over_their_pictures_leave_streams_of_others_alone(server):
    text = {
        "messages": [{"role": "user", "content": "TELL ME"}],
        "max_tokens": 300,
        "seed": 5,
        "temperature": 1,
    }
    asked = {"model": "toy", **text}

    def ask():
        message = said(httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=30, verify=False))
        calls = [call["function"] for call in message.pop("tool_calls", ())]  # their ids are new each time
        return message, calls

    alone, answers = ask(), []
    asking = threading.Thread(target=lambda: answers.append(ask()))
    asking.start()
    wait_for(lambda: server.engine("toy").status().running == 1)
    assert post(server, grey(1), grey(WHICH_FAIL["looked at"])).status_code == 500
    assert server.engine("toy").status().running == 1, "the stream ended too soon to show anything"
    statuses = [ask_badly().status_code for status, ask_badly in ends(server) if status != 200]
    asking.join(20)
    assert answers == [alone]
    assert set(statuses) == {400, 500}


def test_text_is_answered_while_pictures_are_read(server):
    seam(server).shut()
    connection = open_request(server, body(grey(1)))
    assert seam(server).entered.wait(10)
    assert said(post(server))
    assert said(post(server, model="blind"))
    seam(server).gate.set()
    connection.close()


def test_pictures_beyond_the_queue_are_refused_with_429(server):
    """Two requests are read at once and one may wait."""
    seam(server).shut()
    connections = [open_request(server, body(grey(1))) for _ in range(3)]
    work = server.app.state.generation_service._media._workers
    wait_for(lambda: work._begun == 3)
    answer = post(server, grey(1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    seam(server).gate.set()
    for connection in connections:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()


def test_work_that_takes_too_long_is_the_requests_fault_and_its_memory_stays_held(tmp_path, monkeypatch):
    monkeypatch.setattr("darkbloom_core.media._work.GRACE_SECONDS", 0.1)
    with start(tmp_path, media={"decode_seconds": 0.2}) as server:
        seam(server).shut()
        answer = post(server, grey(1))
        assert fault(answer) == (400, "invalid_value", "messages[0].content[0].image_url.url")
        assert "took longer than 0.2 seconds" in answer.json()["error"]["message"]
        assert held(server) == ["result", "work"]
        seam(server).gate.set()
        server.wait_until_idle(5)
        assert said(post(server, grey(1)))


def test_a_server_that_stops_tells_those_whose_pictures_it_still_reads_while_others_end(tmp_path):
    with start(tmp_path, model={"seconds": 0.02}) as server:
        engine, held_seam, answers = server.engine("toy"), seam(server), []
        running = open_request(server, body(model="toy", stream=True, max_tokens=3000))
        wait_for(lambda: engine.status().running == 1)
        held_seam.shut()
        asking = threading.Thread(target=lambda: answers.append(post(server, grey(1))))
        asking.start()
        assert held_seam.entered.wait(10)
        stopping = stop_in_background(server, 30)
        asking.join(10)
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
        assert engine.status().running == 1
        held_seam.gate.set()
        running.close()
        stopping.join(10)
        assert not stopping.is_alive()


# --- what is refused ---------------------------------------------------------------------

GIF, VIDEO = "image/gif", "video/mp4"


def clip(frames, height=16):
    """Half a second for each of its frames, of 32 x ``height`` pixels."""
    return data_uri(video_file(numbered_frames(frames, height, 32), rate=2), VIDEO)


CLIP = clip(6)
LIMITS = {
    "part_bytes": 5000, "image_pixels": 512, "request_image_pixels": 1024, "image_frames": 3,
    "videos": 2, "video_seconds": 3.0, "video_frame_pixels": 7 * 512,
}  # fmt: skip

CAPS = {
    "part_bytes": (
        [data_uri(long_gif(1).ljust(5000, b"\0"), GIF)], [data_uri(long_gif(1).ljust(5001, b"\0"), GIF)],
        "has 5001 bytes, and at most 5000",
    ),
    "image_pixels": ([grey(1, 512, 1)], [grey(1, 513, 1)], "has 513 x 1 pixels, and at most 512"),
    "pixels of a frame": ([CLIP], [clip(6, 32)], "has frames of 32 x 32 pixels, and at most 512"),
    "request_image_pixels": (
        [grey(1, 32), grey(2, 32)], [grey(1, 32), grey(2, 32), grey(1, 1, 1)], "more than 1024 pixels together",
    ),
    "image_frames": ([data_uri(long_gif(3), GIF)], [data_uri(long_gif(4), GIF)], "more than 3 frames"),
    "videos": ([clip(1)] * 2, [clip(1)] * 3, "at most 2 videos"),
    "video_seconds": ([CLIP], [clip(7)], "at most 3 are allowed"),
    "video_frame_pixels": ([CLIP, clip(3)], [CLIP, clip(4)], "more than 3584 pixels together"),
}  # fmt: skip


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    with start(tmp_path_factory.mktemp("capped"), media=LIMITS) as server:
        yield server


@pytest.mark.parametrize("cap", CAPS)
def test_at_each_cap_a_request_passes_and_one_over_it_is_refused_with_the_reason(capped, cap):
    """The model takes four frames of a video."""
    at_the_limit, over, reason = CAPS[cap]
    kind = "video" if over[0].startswith("data:video") else "image"
    assert said(post(capped, *at_the_limit, kind=kind, max_tokens=1))
    answer = post(capped, *over, kind=kind)
    assert fault(answer) == (400, "invalid_value", f"messages[0].content[{len(over) - 1}].{kind}_url.url")
    assert reason in answer.json()["error"]["message"]


def test_a_video_becomes_as_many_pictures_as_frames_are_taken_of_it(server):
    def tokens(frames):
        return post(server, clip(frames), kind="video", max_tokens=1).json()["usage"]["prompt_tokens"]

    one, two = tokens(1), tokens(2)
    assert tokens(4) - one == tokens(9) - one == 3 * (two - one) > 0


@pytest.mark.parametrize(
    ("uris", "kind"), [([grey(1)], "image"), ([CLIP], "video"), ([grey(1), CLIP], "mixed")]
)
def test_a_refusal_says_what_the_model_was_to_see(server, uris, kind):
    content = [part(uri, "image" if uri.startswith("data:image") else "video") for uri in uris]
    request = body(model="blind", messages=[{"role": "user", "content": content}])
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=request)
    first = "video" if kind == "video" else "image"
    assert fault(answer) == (400, "invalid_value", f"messages[0].content[0].{first}_url.url")
    assert f"does not accept {first}s" in answer.json()["error"]["message"]
    assert server.sink.take(*EVENTS) == [
        RequestRefused(status=400, error_code="invalid_value", media_kind=kind)
    ]


def test_a_bomb_over_http_is_refused_and_the_server_goes_on(server):
    for uri in (data_uri(flat_png(16_000, 16_000), "image/png"), data_uri(long_gif(5000), "image/gif")):
        assert fault(post(server, uri)) == (400, "invalid_value", "messages[0].content[0].image_url.url")
    assert said(post(server, grey(1)))
