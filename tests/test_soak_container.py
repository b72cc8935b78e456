"""A server in a container of 3 GiB with more clients than it can serve at once: it lives, and all get their answer.

Needs Linux and the right to make control groups (root in a machine or in a container such as CI's).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
from soak import curve, keep, length

if sys.platform == "linux":  # elsewhere there are no control groups
    from control_group import ControlGroup

    pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

    GIB, MIB = 1024**3, 1024**2
    MODEL = "demo/gpt-oss"
    CLIENTS = 64
    TOGETHER = 8
    """So many requests must get on at any time, as long as there are as many."""

    STALL_SECONDS = 10.0
    """Whoever gets a chunk within so long gets on. A step is much shorter, also on a machine with much else to do."""

    MOST_TOKENS = 30_000
    """Room for so many is reserved for each: twelve of them fill the memory, and none needs it."""

    @dataclass
    class Seen:
        """What became of the clients: refusals by status, each one's chunks by the clock, and its text.

        ``busy`` has the clock and how many sequences ran, while there were enough to choose from.
        """

        refusals: Counter[int] = field(default_factory=Counter)
        chunks: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
        answers: dict[str, str] = field(default_factory=dict)
        busy: list[tuple[float, int]] = field(default_factory=list)
        resident: list[int] = field(default_factory=list)
        open: int = 0

    async def client(http: httpx.AsyncClient, name: str, questions: list[str], seen: Seen) -> None:
        for number, question in enumerate(questions):
            await ask(http, f"{name}.{number}", question, seen)

    async def ask(http: httpx.AsyncClient, name: str, question: str, seen: Seen) -> None:
        """One answer, however often the server says to come back later."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
            "stream": True,
        }
        while True:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code == 200:
                    seen.open += 1
                    try:
                        await read(answer, name, seen)
                    finally:
                        seen.open -= 1
                    return
                assert answer.status_code in (429, 503), await answer.aread()
                seen.refusals[answer.status_code] += 1
                seconds = int(answer.headers["retry-after"])
            assert 1 <= seconds <= 60
            await asyncio.sleep(seconds)

    async def read(answer: httpx.Response, name: str, seen: Seen) -> None:
        text, reason = "", None
        async for line in answer.aiter_lines():
            seen.chunks[name].append(time.monotonic())
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
        assert (line, reason) in (("", "stop"), ("data: [DONE]", "stop")), (line, reason, text)
        seen.answers[name] = text

    async def watch(http: httpx.AsyncClient, process: psutil.Process, seen: Seen) -> None:
        """How many requests run, as long as there are enough of them, and what the process holds."""
        while True:
            (slot,) = (await http.get("/v1/capacity")).json()["slots"]
            seen.resident.append(process.memory_info().rss)
            if seen.open >= 2 * TOGETHER:  # so that some wait, whichever end at this moment
                seen.busy.append((time.monotonic(), slot["running"]))
            await asyncio.sleep(0.1)

    async def play(url: str, process: psutil.Process, each: int) -> Seen:
        seen = Seen()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            watching = asyncio.create_task(watch(http, process, seen))
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    questions = [f"What is {number} + {30 + n}?" for n in range(each)]
                    group.create_task(client(http, str(number), questions, seen))
            watching.cancel()
        return seen

    @pytest.fixture
    def group():
        group = ControlGroup(f"darkbloom-{time.time_ns()}", 3 * GIB)
        yield group
        group.close()

    def test_in_a_container_of_three_gib_sixty_four_clients_all_get_their_answer(
        group, serve, process_environment, tmp_path
    ) -> None:
        process_environment["DARKBLOOM_ENGINE__MAX_ROWS"] = "16"
        process_environment["DARKBLOOM_ENGINE__WAITING_LIMIT"] = "16"
        server = serve(MODEL, python=group.python(tmp_path))
        each = length(8, 1)
        began = time.monotonic()
        seen = asyncio.run(play(server.url, psutil.Process(server.process.pid), each))
        seconds = time.monotonic() - began
        (slot,) = server.get("/v1/capacity").json()["slots"]
        assert server.process.poll() is None
        assert server.stop() == 0

        assert len(seen.answers) == CLIENTS * each
        assert all(seen.answers.values())
        assert seen.refusals[429] > 0  # they were told to come back, and came
        fewest = min(got_on(seen, moment) for moment, _ in seen.busy)
        running = [count for _, count in seen.busy]
        longest = max(
            later - earlier for times in seen.chunks.values() for earlier, later in itertools.pairwise(times)
        )
        keep(
            "server-in-a-container",
            f"{CLIENTS} clients, {CLIENTS * each} answers in {seconds:.0f} s, {sum(seen.refusals.values())} told to "
            f"come back; {statistics.mean(running):.1f} ran, and at least {fewest} got on within any "
            f"{STALL_SECONDS:.0f} s; control group version {group.version}: peak "
            f"{group.peak_bytes / MIB:.0f} MiB of 3,072, {group.kills} killed; resident {curve(thin(seen.resident))}",
            {
                "seconds": round(seconds, 1),
                "refusals": dict(seen.refusals),
                "running": running,
                "longest_stall_seconds": round(longest, 3),
                "peak_bytes": group.peak_bytes,
                "resident_bytes": seen.resident,
            },
        )
        assert group.kills == 0
        assert max(*seen.resident, group.peak_bytes) <= 3 * GIB
        assert slot["token_budget"] * slot["kv_bytes_per_token"] < GIB  # of 3 GiB, 2 are the system's
        assert fewest >= TOGETHER
        assert statistics.median(running) >= TOGETHER
        assert longest < STALL_SECONDS

    def got_on(seen: Seen, moment: float) -> int:
        """How many requests got a chunk within ``STALL_SECONDS`` from ``moment`` on."""
        until = moment + STALL_SECONDS
        return sum(any(moment <= each <= until for each in times) for times in seen.chunks.values())

    def thin(values: list[int]) -> list[int]:
        return values[:: max(1, len(values) // 40)]
