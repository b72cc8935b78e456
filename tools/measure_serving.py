"""Load on servers by a client that nobody here wrote, and what a streamed token costs each server.

python tools/measure_serving.py load [--streams 1,8,32,64] [--requests 3]
python tools/measure_serving.py cpu [--streams 1,8,32] [--repeats 5] [--sides darkbloom,mlx-lm,mlx-vlm]

``load`` runs aiperf against ``darkbloom serve``; it fails if a request does not complete. ``cpu``
runs the same streams against each server in turn, and divides the processor time of its process
by the tokens that its usage says. Needs uv: aiperf and mlx-vlm run in environments of their own.
The peers get the demo checkpoint's weights in mlx-lm's layout, which both read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import psutil
from darkbloom_bench._machine import this_machine
from mlx.utils import tree_flatten

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import Placement
from darkbloom_core.plugins import load_plugins
from darkbloom_core.slots import current_device

MODEL = "demo/gpt-oss"
AIPERF = "aiperf==0.13.0"
MLX_VLM = "mlx-vlm==0.7.10"
SHORT_TOKENS = 16
APART_SECONDS = 0.02
"""Streams begin one after another: mlx-lm's server holds no more than 5 connections that it has not taken yet."""
START_SECONDS = 120
ANSWER_SECONDS = 600


@dataclass
class Served:
    """A server that runs. ``model`` is what its requests name."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    model: str

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time of its processes, and of the main thread of the one that serves."""
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        times = [process.cpu_times() for process in family]
        serving = max(family, key=lambda process: process.num_threads())
        main = [thread for thread in serving.threads() if thread.id == serving.pid]
        in_all = sum(each.user + each.system for each in times)
        return in_all, sum(thread.user_time + thread.system_time for thread in main)


def commands(side: str, port: int, peer_folder: Path, rows: int) -> tuple[list[str], dict[str, str], str]:
    """How to start a server, with which environment, and its model's name."""
    python = sys.executable
    if side == "darkbloom":
        code = "from darkbloom_core.cli import main; main()"
        settings = {"DARKBLOOM_ENGINE__MAX_ROWS": str(rows)}
        return [python, "-c", code, "serve", MODEL, "--port", str(port)], settings, MODEL
    given = ["--model", str(peer_folder), "--host", "127.0.0.1", "--port", str(port)]
    if side == "mlx-lm":
        given += ["--decode-concurrency", str(rows)]
        return [python, "-m", "mlx_lm", "server", *given], {}, str(peer_folder)
    own = ["uv", "run", "--no-project", "--isolated", "--python", python, "--with", MLX_VLM]
    own += ["--with", f"mlx[cpu]=={version('mlx')}" if sys.platform == "linux" else f"mlx=={version('mlx')}"]
    given += ["--max-num-seqs", str(rows)]
    return [*own, "python", "-m", "mlx_vlm.server", *given], {}, str(peer_folder)


@contextlib.contextmanager
def serving(side: str, folder: Path, rows: int) -> Iterator[Served]:
    """A server on a free port, warm."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, settings, model = commands(side, port, folder / "peer", rows)
    with (folder / f"{side}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **settings}, start_new_session=True
        )
        served = Served(side, process, f"http://127.0.0.1:{port}", model)
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{served.url}/v1/models", timeout=5).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{side} did not start: {(folder / f'{side}.log').read_text()[-2000:]}")
                time.sleep(0.2)
            asyncio.run(streams(served, 2, 16, 0))
            yield served
        finally:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    each.terminate()
            process.wait(30)


def write_peer(folder: Path) -> None:
    """The demo checkpoint as mlx-lm and mlx-vlm read it."""
    plugins, device = load_plugins(), current_device()
    source = plugins.checkpoints()[MODEL]
    config = dict(read_config(source))
    family = plugins.family_for(config)
    model: Any = family.load(source, family.describe(config, device), Placement(device))
    folder.mkdir()
    weights = dict(tree_flatten(model.mlx_lm_model().parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    rope = config.pop("rope_parameters")
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "truncate")}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)


def question(number: int) -> str:
    """Its answer has some 200 tokens."""
    return f"Count from {number % 50} to {number % 50 + 49}."


async def streams(served: Served, count: int, tokens: int, seed: int) -> int:
    """``count`` streams at once; how many tokens they had in all."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=served.url, timeout=ANSWER_SECONDS, limits=limits) as client:

        async def one(number: int) -> int:
            body = {
                "model": served.model,
                "messages": [{"role": "user", "content": question(seed + number)}],
                "temperature": 0,
                "max_tokens": tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            had = 0
            await asyncio.sleep(number * APART_SECONDS)
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if '"completion_tokens"' in line:
                        had = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
            if not had:
                raise SystemExit(f"{served.name}: a stream without usage")
            return had

        return sum(await asyncio.gather(*(one(number) for number in range(count))))


def measure_cpu(counts: Sequence[int], repeats: int, tokens: int, sides: Sequence[str], folder: Path) -> None:
    """Print a row for each number of streams and side: medians over the repeats, in which the sides take turns.

    Each turn has a short run and a long one: their difference is what a further token costs, without the prompts.
    """
    write_peer(folder / "peer")
    found: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(side, folder, max(counts))) for side in sides]
        for count in counts:
            for repeat in range(-1, repeats):  # one turn is not counted
                for served in servers if repeat % 2 else servers[::-1]:
                    short = spent(served, count, SHORT_TOKENS, 2 * repeat + 2)
                    long = spent(served, count, tokens, 2 * repeat + 3)
                    if repeat >= 0:
                        more = long.tokens - short.tokens
                        each = (
                            1e3 * (long.cpu_seconds - short.cpu_seconds) / more,
                            1e3 * (long.main_seconds - short.main_seconds) / more,
                            1e3 * long.cpu_seconds / long.tokens,
                            long.tokens / long.seconds,
                        )
                        found.setdefault((count, served.name), []).append(each)
                        say(f"{count} streams, {served.name}: " + ", ".join(f"{value:.2f}" for value in each))
    print(
        "| streams | server | a further token | of it the main thread | a token with its prompt | tokens per second |"
    )
    print("|---|---|---|---|---|---|")
    for (count, name), runs in found.items():
        further, main, whole, rate = (statistics.median(column) for column in zip(*runs, strict=True))
        low, high = min(run[0] for run in runs), max(run[0] for run in runs)
        print(
            f"| {count} | {name} | {further:.2f} ({low:.2f} to {high:.2f}) | {main:.2f} | {whole:.2f} | {rate:.0f} |"
        )


@dataclass(frozen=True)
class Spent:
    tokens: int
    seconds: float
    cpu_seconds: float
    main_seconds: float


def spent(served: Served, count: int, tokens: int, run: int) -> Spent:
    """``count`` streams at once, and what they took; each ``run`` has questions of its own."""
    began, (before, main_before) = time.monotonic(), served.cpu_seconds()
    had = asyncio.run(streams(served, count, tokens, run * count))
    seconds, (after, main_after) = time.monotonic() - began, served.cpu_seconds()
    return Spent(had, seconds, after - before, main_after - main_before)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_load(counts: Sequence[int], requests: int, tokens: int, folder: Path) -> None:
    """Print a row for each number of streams; leave with 1 if a request did not complete."""
    lost = 0
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": question(number)}) + "\n" for number in range(50)))
    tokenizer = load_plugins().checkpoints()[MODEL]
    print(
        "| streams | requests | completed | first token p50, p99 (ms) | between tokens p50, p99 (ms) | tokens per second |"
    )
    print("|---|---|---|---|---|---|")
    with serving("darkbloom", folder, max(counts)) as served:
        for count in counts:
            out = folder / f"aiperf-{count}"
            asked = max(requests * count, 8)
            command = ["uv", "tool", "run", "--python", sys.executable, "--from", AIPERF, "aiperf", "profile"]
            command += ["-m", MODEL, "--url", served.url, "--endpoint-type", "chat", "--streaming"]
            command += ["--concurrency", str(count), "--request-count", str(asked)]
            command += ["--input-file", str(prompts), "--custom-dataset-type", "single_turn"]
            command += ["--extra-inputs", json.dumps({"temperature": 0, "max_tokens": tokens})]
            command += ["--tokenizer", str(tokenizer), "--use-server-token-count", "--ui", "none"]
            command += ["--no-gpu-telemetry", "--no-server-metrics", "--output-artifact-dir", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            report = out / "profile_export_aiperf.json"
            if done.returncode or not report.exists():
                raise SystemExit(f"aiperf failed: {done.stdout[-3000:]}{done.stderr[-3000:]}")
            figures = json.loads(report.read_text())
            completed = round(figures["request_count"]["avg"])
            lost += asked - completed
            first, between = figures["time_to_first_token"], figures["inter_token_latency"]
            rate = figures["output_token_throughput"]["avg"]
            print(
                f"| {count} | {asked} | {completed} | {first['p50']:.0f}, {first['p99']:.0f} "
                f"| {between['p50']:.1f}, {between['p99']:.1f} | {rate:.0f} |",
                flush=True,
            )
    if lost:
        raise SystemExit(f"{lost} requests did not complete")


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("load", "cpu"))
    parser.add_argument("--streams", type=numbers)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3, help="requests for each stream")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sides", default="darkbloom,mlx-lm,mlx-vlm")
    given = parser.parse_args()
    print(f"{MODEL} on {this_machine(current_device())}\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "load":
            measure_load(given.streams or [1, 8, 32, 64], given.requests, given.tokens, folder)
        else:
            sides = given.sides.split(",")
            measure_cpu(given.streams or [1, 8, 32], given.repeats, given.tokens, sides, folder)


if __name__ == "__main__":
    main()
