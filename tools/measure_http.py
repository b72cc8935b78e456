"""Output tokens per second of one model through HTTP and in process, in alternating pairs; the ratio is printed.

    python tools/measure_http.py MODEL [--streams 32] [--pairs 10] [--tokens 128] [--server-cores 0-7] [--client-cores 8-15]

``MODEL`` is what ``serve`` takes. Two processes hold the model on the same cores, and one is
idle while the other runs: ``darkbloom serve``, asked by an HTTP client of this process, and
an engine whose streams an event loop reads, as the server's does. Both get the same prompts
and settings, so both give the same tokens; where they do not, the run ends with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

WORDS = "one two three four five six seven eight nine ten"
HERE = str(Path(__file__).resolve())


def main() -> None:
    asked = _arguments()
    _pin(os.getpid(), asked.client_cores)
    with _server(asked) as url, _engine(asked) as engine:
        rates: list[tuple[float, float]] = []
        for pair in range(-1, asked.pairs):  # the first one warms both
            prompts = _prompts(asked, pair)
            order = (0, 1) if pair % 2 else (1, 0)
            found: dict[int, tuple[int, float]] = {}
            for side in order:
                found[side] = engine(prompts) if side else asyncio.run(_over_http(url, asked, prompts))
            if found[0][0] != found[1][0]:
                sys.exit(f"pair {pair}: {found[0][0]} tokens over HTTP, {found[1][0]} in process")
            if pair >= 0:
                rates.append((found[0][0] / found[0][1], found[1][0] / found[1][1]))
                print(
                    f"pair {pair + 1}: {rates[-1][0]:.0f} tokens/s over HTTP, {rates[-1][1]:.0f} in process",
                    flush=True,
                )
    ratios = [http / process for http, process in rates]
    print(
        f"{asked.model}, {asked.streams} streams of {asked.tokens} tokens, {asked.pairs} pairs: "
        f"HTTP by in process: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--server-cores", help="such as 0-7")
    parser.add_argument("--client-cores", help="such as 8-15")
    parser.add_argument("--serve-in-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _prompts(asked: argparse.Namespace, pair: int) -> list[str]:
    words = WORDS.split()
    return [
        " ".join(
            words[(pair * 7 + stream * 3 + place * place) % len(words)] for place in range(asked.prompt_words)
        )
        for stream in range(asked.streams)
    ]


async def _over_http(url: str, asked: argparse.Namespace, prompts: list[str]) -> tuple[int, float]:
    """Tokens and seconds, from the first request to the last token."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        served = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]

        async def one(prompt: str) -> int:
            body = {
                "model": served,
                "prompt": prompt,
                "max_tokens": asked.tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            tokens = 0
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    sys.exit(f"{answer.status_code}: {(await answer.aread()).decode()}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            return tokens

        began = time.perf_counter()
        counts = await asyncio.gather(*map(one, prompts))
        return sum(counts), time.perf_counter() - began


def _settings(asked: argparse.Namespace) -> dict[str, str]:
    """Alike for both: as many rows as streams, nothing kept from one run for another."""
    return {
        **os.environ,
        "DARKBLOOM_ENGINE__MAX_ROWS": str(asked.streams),
        "DARKBLOOM_PREFIX__REUSE": "off",
        "DARKBLOOM_TELEMETRY__SAMPLE_SECONDS": "0",
    }


@contextmanager
def _server(asked: argparse.Namespace) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from darkbloom_core.cli import main; main()"]
    command += ["serve", asked.model, "--port", str(port)]
    process = subprocess.Popen(
        command, env=_settings(asked), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _pin(process.pid, asked.server_cores)
        url = f"http://127.0.0.1:{port}"
        while True:
            if process.poll() is not None:
                sys.exit(f"darkbloom serve ended with {process.returncode}")
            try:
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _engine(asked: argparse.Namespace) -> Iterator:
    """What runs prompts in a process of its own: tokens and seconds."""
    command = [sys.executable, HERE, asked.model, "--serve-in-process"]
    command += ["--streams", str(asked.streams), "--tokens", str(asked.tokens)]
    process = subprocess.Popen(
        command, env=_settings(asked), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _pin(process.pid, asked.server_cores)
    assert process.stdin is not None
    assert process.stdout is not None

    def run(prompts: list[str]) -> tuple[int, float]:
        print(json.dumps(prompts), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            sys.exit("the process that holds the engine ended")
        tokens, seconds = json.loads(answer)
        return tokens, seconds

    try:
        yield run
    finally:
        process.stdin.close()
        process.wait()


def _serve_in_process(asked: argparse.Namespace) -> None:
    from darkbloom_core.contracts import Prompt
    from darkbloom_core.engine import GenerationRequest, OutputEnd, PlainParser, SamplingParams
    from darkbloom_core.plugins import load_plugins
    from darkbloom_core.settings import load_settings
    from darkbloom_core.slots import ModelPlaces, SlotManager, hub_folder, resolve_model
    from darkbloom_core.telemetry import SinkEmitter

    plugins, settings = load_plugins(), load_settings(None)
    found = resolve_model(asked.model, ModelPlaces(hub=hub_folder(os.environ), offered=plugins.checkpoints()))
    slots = SlotManager(settings, plugins.family_for, SinkEmitter([]))
    slot = slots.load(found.name, found.path)

    async def one(name: str, prompt: str) -> int:
        stream = slot.engine.submit(
            GenerationRequest(
                id=name,
                prompt=Prompt(slot.codec.encode_text(prompt)),
                parser=PlainParser(),
                max_tokens=asked.tokens,
                sampling=SamplingParams(temperature=0.0),
            )
        )
        async for event in stream:
            if isinstance(event, OutputEnd):
                return event.usage.completion_tokens
        raise AssertionError("a stream ended without its last event")

    async def all_of(prompts: list[str]) -> tuple[int, float]:
        began = time.perf_counter()
        counts = await asyncio.gather(*(one(str(place), prompt) for place, prompt in enumerate(prompts)))
        return sum(counts), time.perf_counter() - began

    for line in sys.stdin:
        print(json.dumps(asyncio.run(all_of(json.loads(line)))), flush=True)
    slots.close()


def _pin(process: int, cores: str | None) -> None:
    if cores:
        first, _, last = cores.partition("-")
        os.sched_setaffinity(process, range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    if "--serve-in-process" in sys.argv:
        _serve_in_process(_arguments())
    else:
        main()
