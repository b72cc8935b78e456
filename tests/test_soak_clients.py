"""Hundreds of clients that vanish at random moments, while another one is served all the time.

Each is a process of its own that is killed, so that its connection ends as the kernel ends it:
in order, or with a reset. Afterwards nothing is left of any of them.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from soak import keep, length
from toy_server import ToyServer

from darkbloom_core.contracts import RequestFinished, RequestRefused, RequestStarted

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

AT_ONCE = 12
"""Clients at one moment, beside the one that stays: more than there are rows, so that some wait."""

KEYS = {"vanishing": "vanishing-0123456789", "staying": "staying-0123456789"}

CLIENT = """
import socket, struct, sys
port, resets, waits = map(int, sys.argv[1:])
connection = socket.create_connection(("127.0.0.1", port))
if resets:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
connection.sendall(sys.stdin.buffer.read())
print("sent", flush=True)
while waits or connection.recv(4096):
    pass
"""
"""Sends what it is given; then it reads, or (if it ``waits``) does not and lets the server's buffers fill."""


@pytest.fixture
def server(tmp_path):
    tables = {
        "keys": KEYS,
        "server": {"key_concurrency": AT_ONCE},
        "engine": {"max_rows": 8, "waiting_limit": 64},
    }
    models = {"slow": {"seconds": 0.004}, "plain": {}}
    with ToyServer(tmp_path, models, **tables).running() as server:
        yield server


def request_of(chance: random.Random) -> bytes:
    """A request, whole or cut somewhere: any prompt, any way to be answered."""
    body = {
        "model": chance.choice(["slow", "slow", "plain"]),
        "messages": [{"role": "user", "content": "X" * chance.choice([5, 300, 3000])}],
        "max_tokens": chance.choice([5, 1000]),
        "stream": chance.random() < 0.5,
        "n": chance.choice([1, 1, 1, 3]),
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {KEYS['vanishing']}\r\n"
    whole = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    return whole[: chance.randrange(1, len(whole))] if chance.random() < 0.15 else whole


def vanish(port: int, number: int) -> None:
    """One client, from its first byte to its end at a random moment."""
    chance = random.Random(number)
    options = [str(port), str(int(chance.random() < 0.5)), str(int(chance.random() < 0.2))]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CLIENT, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(request_of(chance))
        process.stdin.close()
        assert process.stdout.readline() == b"sent\n"
        time.sleep(chance.choice([0.0, chance.random() * 0.05, chance.random(), 0.5 + chance.random()]))
        process.send_signal(signal.SIGKILL)


def ask(server, **fields) -> httpx.Response:
    body = {"model": "plain", "messages": [{"role": "user", "content": "HELLO"}], "max_tokens": 20, "seed": 3}
    key = {"x-api-key": KEYS["staying"]}
    return httpx.post(f"{server.url}/v1/chat/completions", json={**body, **fields}, headers=key, timeout=60)


def hold(server) -> socket.socket:
    data = json.dumps({"model": "slow", "messages": [{"role": "user", "content": "X"}], "max_tokens": 4000})
    connection = socket.create_connection(("127.0.0.1", server.background.port), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {KEYS['vanishing']}\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n{data}".encode())
    return connection


def requests_in(ledger) -> set[str]:
    """What is reserved, but for caches: those stay."""
    return {key for key in ledger.reservations() if not key.endswith("/prefix cache")}


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def moment(event: object) -> str:
    """How far a request had come when its client vanished."""
    if isinstance(event, RequestRefused):
        return "before it was accepted"
    if event.status == 200:
        return "answered before"
    if event.prefill_seconds is None:
        return "queue"
    return "prefill" if event.decode_seconds is None else "decode"


def test_nothing_is_left_of_clients_that_vanish(server) -> None:
    clients = length(500, 30)
    process, answers, stop = psutil.Process(), [], threading.Event()
    expected = ask(server).json()["choices"]
    ledger = server.slots.memory.ledger
    server.wait_until_idle(5)
    held_before, files_before = requests_in(ledger), process.num_fds()
    server.sink.take()

    def stay() -> None:
        while not stop.is_set():
            answers.append(ask(server))

    staying = threading.Thread(target=stay)
    staying.start()
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda number: vanish(server.background.port, number), range(clients)))
    seconds = time.monotonic() - began
    stop.set()
    staying.join(60)

    server.wait_until_idle(10)
    assert requests_in(ledger) == held_before
    events = server.sink.take(RequestStarted, RequestFinished, RequestRefused)
    started = sum(isinstance(event, RequestStarted) for event in events)
    ended = [event for event in events if not isinstance(event, RequestStarted)]
    assert started == sum(isinstance(event, RequestFinished) for event in ended)
    assert {event.status for event in ended} <= {200, 400, 429, 499}
    assert answers
    for answer in answers:
        assert (answer.status_code, answer.json()["choices"]) == (200, expected)

    held = [hold(server) for _ in range(AT_ONCE)]  # as many as the key may: nobody's place was lost
    status = server.engine("slow").status
    wait_for(lambda: status().running + status().waiting == AT_ONCE)
    for connection in held:
        connection.close()
    server.wait_until_idle(10)
    assert ask(server, model="slow").status_code == 200
    wait_for(lambda: process.num_fds() <= files_before)
    moments = Counter(moment(event) for event in ended)
    moments["answered before"] -= len(answers)
    keep(
        "clients-vanish",
        f"{clients} clients killed in {seconds:.0f} s, while another had {len(answers)} answers; "
        + ", ".join(f"{count} {name}" for name, count in sorted(moments.items())),
        {
            "clients": clients,
            "moments": dict(moments),
            "answers_meanwhile": len(answers),
        },
    )
