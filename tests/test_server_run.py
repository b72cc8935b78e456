"""The server as a process: its address, and how signals end it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from darkbloom_core.errors import SetupError
from darkbloom_core.server import BackgroundServer, create_app, serve
from darkbloom_core.settings import Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

PROGRAM = """
import sys
from pathlib import Path
from toy_server import ToyServer
from darkbloom_core.server import serve
server = ToyServer(Path(sys.argv[1]), {"toy": {"seconds": 0.02}})
serve(server.app, "127.0.0.1", 0, drain_seconds=float(sys.argv[2]), when_ready=lambda url: print(url, flush=True))
server.slots.close()
print("ended well", flush=True)
"""

STREAM = {"model": "toy", "messages": [{"role": "user", "content": "X"}], "stream": True}


class Process:
    def __init__(self, folder, drain_seconds):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(drain_seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parent / "support"), "PATH": os.environ["PATH"]},
            cwd=folder,
        )
        self.url = self.popen.stdout.readline().strip()

    def stream(self, max_tokens):
        """Start a stream in a thread; gives the list that its lines go to, once the first has come."""
        lines, begun = [], threading.Event()

        def read():
            with httpx.stream(
                "POST",
                f"{self.url}/v1/chat/completions",
                json={**STREAM, "max_tokens": max_tokens},
                timeout=30,
            ) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(10)
        return lines, thread

    def end(self, seconds):
        """Seconds until the process has ended, its exit code, and its last line."""
        began = time.monotonic()
        output, _ = self.popen.communicate(timeout=seconds)
        return time.monotonic() - began, self.popen.returncode, output.strip()


AT_ONCE_SECONDS = 10
"""On a machine with other work; requests may run for 30 s more where they are waited for."""


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(drain_seconds):
        processes.append(Process(tmp_path, drain_seconds))
        return processes[-1]

    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


def test_ctrl_c_during_a_stream_ends_at_once_and_well(start) -> None:
    process = start(30)
    lines, thread = process.stream(max_tokens=3000)
    process.popen.send_signal(signal.SIGINT)
    seconds, code, output = process.end(30)
    thread.join(5)
    assert (code, output) == (0, "ended well")
    assert seconds < AT_ONCE_SECONDS
    assert '"draining"' in [line for line in lines if line][-1]


def test_sigterm_lets_a_stream_finish_and_says_that_it_is_draining(start) -> None:
    process = start(30)
    with httpx.Client(base_url=process.url) as client:
        lines, thread = process.stream(max_tokens=100)
        process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        health = client.get("/health/ready")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    _, code, output = process.end(20)
    thread.join(5)
    assert (code, output) == (0, "ended well")
    assert [line for line in lines if line][-1] == "data: [DONE]"


def test_sigterm_does_not_wait_longer_than_it_may(start) -> None:
    process = start(0.5)
    lines, thread = process.stream(max_tokens=3000)
    process.popen.send_signal(signal.SIGTERM)
    seconds, code, output = process.end(30)
    thread.join(5)
    assert (code, output) == (0, "ended well")
    assert 0.5 <= seconds < 0.5 + AT_ONCE_SECONDS
    assert '"draining"' in [line for line in lines if line][-1]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_wait_for_running_requests(start, second) -> None:
    process = start(30)
    lines, thread = process.stream(max_tokens=3000)
    process.popen.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.popen.poll() is None
    process.popen.send_signal(second)
    seconds, code, output = process.end(30)
    thread.join(5)
    assert (code, output) == (0, "ended well")
    assert seconds < AT_ONCE_SECONDS
    assert '"draining"' in [line for line in lines if line][-1]


def test_a_signal_to_an_idle_server_ends_it_at_once(start) -> None:
    process = start(30)
    with httpx.Client(base_url=process.url) as client:  # keeps its connection open
        assert client.get("/health/ready").status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        seconds, code, output = process.end(30)
    assert (code, output) == (0, "ended well")
    assert seconds < AT_ONCE_SECONDS


@pytest.fixture
def empty_app():
    settings, emitter = Settings(telemetry={"sample_seconds": 0}), SinkEmitter()
    slots = SlotManager(settings, lambda config: pytest.fail("nothing is loaded"), emitter)
    yield create_app(slots, settings, emitter)
    slots.close()


def test_a_free_port_is_found_and_told(empty_app) -> None:
    with BackgroundServer(empty_app) as server:
        assert server.port > 0
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{server.url}/health/live").status_code == 200


def test_small_answers_do_not_wait_for_the_client_to_acknowledge_the_last_one(empty_app) -> None:
    with BackgroundServer(empty_app) as server, httpx.Client(base_url=server.url) as client:
        seconds = []
        for _ in range(10):
            begun = time.monotonic()
            client.get("/health/live")
            seconds.append(time.monotonic() - begun)
    assert min(seconds[2:]) < 0.03


def test_an_address_that_cannot_be_had_is_said_so(empty_app) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1 port {port}"):
            BackgroundServer(empty_app, port=port)
        with pytest.raises(SetupError, match=f"port {port}"):
            serve(empty_app, "127.0.0.1", port, drain_seconds=0)
    with pytest.raises(SetupError, match=r"no\.such\.host\.invalid"):
        BackgroundServer(empty_app, host="no.such.host.invalid")
