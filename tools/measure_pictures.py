"""How long rows of text wait for their next token while pictures arrive.

Starts ``darkbloom serve``, lets some rows decode, then sends pictures, each in a request of
its own, all at once, and goes on until each of these has its answer. Everything is seen from
outside, over HTTP: the time between two tokens of one row, before the pictures and beside
them. Pictures are never the same, so each is decoded, scaled, looked at and prefilled. A slice
is never less than a layer, so the seconds of a layer are measured first, by the engine's own
warm-up, with nothing beside it.

    python tools/measure_pictures.py
    python tools/measure_pictures.py --model demo/gemma4 --pictures 10 --megapixels 12 --rounds 5
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from darkbloom_bench._ours import NumberCodec
from darkbloom_bench._subject import checkpoint_subject
from PIL import Image

from darkbloom_core.engine import Engine, EngineOptions
from darkbloom_core.plugins import load_plugins
from darkbloom_core.slots import ModelPlaces, current_device, hub_folder

QUESTION = "What colour is the shape?"
STORY = "Tell me a story about a baker, a pilot and a lantern."
TIMEOUT_SECONDS = 600.0


@dataclass
class Row:
    """A row of text that decodes: when each of its tokens came."""

    times: list[float] = field(default_factory=list)
    done: bool = False

    def gaps(self, first: float, last: float) -> list[float]:
        """Seconds between tokens, of every gap that lies in part between ``first`` and ``last``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if after > first and before < last]


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between two tokens of a row."""

    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: list[float]) -> Gaps:
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(*(1000 * ordered[round(share * last)] for share in (0.5, 0.99, 1.0)))


def slowest_layer(model: str) -> float:
    """Milliseconds of a layer of a chunk, or of the tower for its largest picture, whichever takes longer."""
    plugins, device = load_plugins(), current_device()
    places = ModelPlaces(hub=hub_folder(os.environ), aliases={}, offered=plugins.checkpoints())
    subject = checkpoint_subject(model, places, plugins, device)
    codec = NumberCodec(subject.description.vocab_size)
    engine = Engine(subject.name, codec, subject.load, EngineOptions(max_rows=4, chained=False, packed=False))
    try:
        engine.load_model()
        engine.start(1 << 28)
        choices = engine.status().choices
        assert choices is not None
        return 1000 * max(choices.layer_seconds or 0.0, choices.tower_layer_seconds or 0.0)
    finally:
        engine.close()


@contextlib.contextmanager
def server(model: str, slice_milliseconds: float) -> Iterator[str]:
    """A server of ``model``; gives its address."""
    settings = {"DARKBLOOM_ENGINE__SLICE_MILLISECONDS": str(slice_milliseconds)}
    command = [str(Path(sys.executable).with_name("darkbloom")), "serve", model, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **settings}
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"http://[\d.]+:\d+", line)
            if found:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield found[0]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


def picture(pixels: int, seed: int) -> str:
    """A new picture of so many pixels, 4 to 3, as a JPEG in a ``data:`` URI."""
    height = round((pixels * 3 / 4) ** 0.5)
    width = height * 4 // 3
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 50, width // 50, 3)).astype(np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = random.integers(0, 24, (height, width, 1), dtype=np.uint8)
    shaded = np.minimum(np.asarray(image), 231) + grain
    buffer = io.BytesIO()
    Image.fromarray(shaded).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def decode(address: str, model: str, row: Row, number: int, stop: threading.Event) -> None:
    """Stream a long answer into ``row`` until ``stop``; the end tokens are forbidden."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{STORY} {number}"}],
        "temperature": 0,
        "max_tokens": 6000,
        "logit_bias": {"1": -100, "6": -100, "21": -100},
        "stream": True,
        "logprobs": True,  # so that a token is seen that has no text
    }
    with (
        httpx.Client(timeout=TIMEOUT_SECONDS) as client,
        client.stream("POST", f"{address}/v1/chat/completions", json=body) as response,
    ):
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                row.times.append(time.monotonic())
            if stop.is_set():
                break
    row.done = True


def ask(address: str) -> None:
    """What the process that asks about pictures does: bodies come in, at the word the requests go out, statuses come back."""
    asked: list[bytes] = pickle.load(sys.stdin.buffer)
    statuses = [0] * len(asked)

    def one(number: int) -> None:
        response = httpx.post(
            f"{address}/v1/chat/completions",
            content=asked[number],
            headers={"content-type": "application/json"},
            timeout=TIMEOUT_SECONDS,
        )
        statuses[number] = response.status_code

    print("ready", flush=True)
    sys.stdin.buffer.readline()
    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(statuses), flush=True)


class Asking:
    """A process that asks about pictures, at the lowest priority: it stands for clients on other machines."""

    def __init__(self, address: str, asked: list[bytes]) -> None:
        command = ["nice", "-n", "19", sys.executable, __file__, "--ask", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._say(pickle.dumps(asked))
        self._hear()

    def run(self) -> list[int]:
        """The statuses of the answers, when all are there."""
        self._say(b"go\n")
        statuses: list[int] = json.loads(self._hear())
        self._process.wait()
        return statuses

    def _say(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _hear(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def bodies(model: str, count: int, pixels: int, seed: int) -> list[bytes]:
    """Requests with one picture each."""
    found = []
    for number in range(count):
        content = [
            {"type": "image_url", "image_url": {"url": picture(pixels, seed + number)}},
            {"type": "text", "text": QUESTION},
        ]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 8,
        }
        found.append(json.dumps(body).encode())
    return found


def measure(address: str, arguments: argparse.Namespace, seed: int) -> tuple[Gaps, Gaps, float]:
    """Gaps alone, gaps beside the pictures, and the seconds that these took."""
    asked = bodies(arguments.model, arguments.pictures, round(arguments.megapixels * 1e6), seed)
    asking = Asking(address, asked)
    rows, stop = [Row() for _ in range(arguments.rows)], threading.Event()
    streams = [
        threading.Thread(target=decode, args=(address, arguments.model, row, seed + number, stop))
        for number, row in enumerate(rows)
    ]
    for stream in streams:
        stream.start()
    while any(len(row.times) < 16 for row in rows):
        time.sleep(0.01)
    began = time.monotonic()
    time.sleep(arguments.alone_seconds)
    arrived = time.monotonic()
    statuses = asking.run()
    ended = time.monotonic()
    if any(row.done for row in rows) or set(statuses) != {200}:
        raise SystemExit("a row of text or a picture ended too soon")
    stop.set()
    for stream in streams:
        stream.join()
    alone = [gap for row in rows for gap in row.gaps(began, arrived)]
    beside = [gap for row in rows for gap in row.gaps(arrived, ended)]
    return Gaps.of(alone), Gaps.of(beside), ended - arrived


def main() -> None:
    """Measure some rounds, and show their medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo/gemma4")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=10)
    parser.add_argument("--megapixels", type=float, default=12.0)
    parser.add_argument("--slice-milliseconds", type=float, default=50.0)
    parser.add_argument("--alone-seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments.ask)
        return
    layer = slowest_layer(arguments.model)
    print(
        f"a layer takes up to {layer:.1f} ms, a slice {max(layer, arguments.slice_milliseconds):.1f} ms",
        flush=True,
    )
    found = []
    with server(arguments.model, arguments.slice_milliseconds) as address:
        for number in range(arguments.rounds + 1):  # the first one warms up
            alone, beside, seconds = measure(address, arguments, 1000 * number)
            if number:
                found.append((alone, beside, seconds))
                print(f"round {number}: alone {alone}, beside pictures {beside}, {seconds:.1f} s", flush=True)

    def median(side: int, name: str) -> float:
        return statistics.median(getattr(each[side], name) for each in found)

    for side, name in enumerate(("alone", "beside pictures")):
        figures = ", ".join(f"{each} {median(side, each):.1f} ms" for each in ("p50", "p99", "longest"))
        print(f"{name}: {figures}")
    bounds = [median(0, name) + max(layer, arguments.slice_milliseconds) for name in ("p50", "p99")]
    print(f"a step as it is alone (p50, p99) and one slice: {bounds[0]:.1f} ms, {bounds[1]:.1f} ms")


if __name__ == "__main__":
    main()
