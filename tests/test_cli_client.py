"""The chat client against a server whose answers are scripted, byte by byte."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from darkbloom_core.cli._client import ChatClient, ChatError, Piece
from darkbloom_core.errors import SetupError


class Script(BaseHTTPRequestHandler):
    """Answers every request with the server's ``status`` and ``body``, and keeps what came."""

    def do_GET(self):
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers["authorization"])
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.do_GET()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    server.paths, server.keys, server.asked, server.status, server.body = [], [], [], 200, b""
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def chunk(**delta) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def ask(server) -> list[Piece]:
    return list(ChatClient(server.url).stream("m", [{"role": "user", "content": "hi"}]))


def test_content_and_reasoning_come_in_order_and_comments_are_no_events(server) -> None:
    server.body = b"".join(
        [
            chunk(role="assistant", content=None),
            b": keep-alive\n\n",
            chunk(reasoning_content="hm"),
            chunk(content="a"),
            b'data: {"choices": [], "usage": {}}\n\n',
            chunk(content="b"),
            b"data: [DONE]\n\n",
        ]
    )
    assert ask(server) == [Piece("reasoning", "hm"), Piece("content", "a"), Piece("content", "b")]
    assert server.asked == [{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}]


def test_a_key_is_shown_and_a_refusal_of_it_says_where_to_put_another(server) -> None:
    server.status, server.body = 401, b'{"error": {"message": "wrong key"}}'
    with pytest.raises(SetupError, match=r"^wrong key \(set DARKBLOOM_API_KEY to the key\)$"):
        ChatClient(server.url, "the key").models()
    assert server.keys == ["Bearer the key"]
    with pytest.raises(SetupError):
        ChatClient(server.url).models()
    assert server.keys == ["Bearer the key", None]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_in_v1(server, suffix: str) -> None:
    server.body = b'{"data": [{"id": "one"}, {"id": "two"}]}'
    assert ChatClient(server.url + suffix).models() == ("one", "two")
    assert server.paths == ["/v1/models"]


def test_a_refusal_carries_the_servers_words(server) -> None:
    server.status, server.body = 404, b'{"error": {"message": "no such model"}}'
    with pytest.raises(ChatError, match=r"^no such model$"):
        ask(server)


def test_a_refusal_that_is_not_of_the_openai_shape_is_told_by_its_status(server) -> None:
    server.status, server.body = 502, b"<html>"
    with pytest.raises(ChatError, match=r"^HTTP status 502$"):
        ask(server)


def test_an_error_inside_a_stream_is_raised(server) -> None:
    server.body = chunk(content="a") + b'data: {"error": {"message": "the step failed"}}\n\n'
    with pytest.raises(ChatError, match="the step failed"):
        ask(server)


def test_a_stream_that_just_ends_is_not_a_whole_answer(server) -> None:
    server.body = chunk(content="a")
    with pytest.raises(ChatError, match="without saying that it is complete"):
        ask(server)


@pytest.mark.parametrize("url", ["localhost", "ftp://host", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="not the address of a server"):
        ChatClient(url)


def test_where_nothing_answers_is_said() -> None:
    with pytest.raises(SetupError, match=r"no server answers at http://127.0.0.1:9"):
        ChatClient("http://127.0.0.1:9").models()
