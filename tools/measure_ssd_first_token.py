"""Time to the first token of prompts that only the disk knows, next to the same prompts computed cold.

One engine computes random prompts, and the tier writes them; then a process of its own, over
the same weights and the same folder, begins with nothing in memory and answers them again,
page cache dropped before each. Both have answered another prompt of that length before, so
that kernels are built and prefill's speed is known. Exit 1 if an answer differs; with
``--logits`` the bytes of every logit of the answers are compared too, and decoding is not compiled.

    uv run python tools/measure_ssd_first_token.py --model demo/gpt-oss --folder /on/the/disk
    uv run python tools/measure_ssd_first_token.py --shape gpt-oss-20b --prompt-tokens 8192
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from darkbloom_bench._bits import RecordingModel
from darkbloom_bench._first_token import ANSWER_TOKENS, Asked, OurPrompts
from darkbloom_bench._ours import NumberCodec
from darkbloom_bench._subject import Subject, checkpoint_subject, longest, shape_subject
from darkbloom_ssd_tier._store import Stores
from darkbloom_ssd_tier._tier import SsdTier, SsdTierFactory

from darkbloom_core.contracts import Event, LoadedModel, PartsFetched, TierContext
from darkbloom_core.engine import Engine, EngineOptions, PrefixOptions, lane_bytes, row_bytes
from darkbloom_core.plugins import load_plugins
from darkbloom_core.prefix import Numerics
from darkbloom_core.slots import ModelPlaces, current_device, hub_folder
from darkbloom_core.telemetry import SinkEmitter

MEBIBYTE = 1024**2


class Readings:
    """A telemetry sink that keeps what the tier says of its fetches."""

    name = "readings"

    def __init__(self) -> None:
        self.kept: list[PartsFetched] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, PartsFetched):
            self.kept.append(event)

    def close(self) -> None:
        """Nothing to close."""


def open_tier(folder: Path, readings: Readings) -> SsdTier:
    """The tier of ``folder``, as a process opens it that has just begun."""
    options = {
        "key_store": "file",
        "key_file": str(folder / "key"),
        "free_bytes_floor": 0,
        "first_sight_share": 1.0,
        "write_bytes_per_day": 1 << 50,
        "queue_bytes": 4 << 30,
    }
    context = TierContext(
        model="measured",
        directory=folder / "cache",
        bytes_limit=1 << 50,
        options=options,
        reserve=lambda _: True,
        emitter=SinkEmitter([readings]),
    )
    tier = SsdTierFactory(Stores()).open(context)
    tier.settle()
    return tier


@contextmanager
def engine_over(
    subject: Subject, model: Any, folder: Path, options: EngineOptions, most_tokens: int, readings: Readings
) -> Iterator[tuple[OurPrompts, SsdTier]]:
    """An engine with nothing in memory, over what is in ``folder``."""
    layers = subject.description.layers
    tier = open_tier(folder, readings)
    numerics = Numerics(
        weights=b"w" * 32,
        family=subject.description.family,
        family_version="",
        mlx_version="",
        backend=current_device().kind,
        device="",
        layers=layers,
        chunk_tokens=options.chunk_tokens,
    )
    prefix = PrefixOptions(
        numerics=numerics, secret=b"s" * 32, ram_bytes=1 << 50, open_tiers=lambda: {"ssd-tier": tier}
    )
    engine = Engine(subject.name, NumberCodec(subject.description.vocab_size), lambda: model, options)
    try:
        engine.load_model()
        row, lane = row_bytes(layers, most_tokens), lane_bytes(layers)
        engine.start(2 * options.max_rows * (row + lane) + 12 * (row + 4 * lane), prefix=prefix)
        yield OurPrompts(engine), tier
    finally:
        engine.close()


def drop_caches(folder: Path) -> None:
    """Let none of the tier's files be in the page cache."""
    for file in folder.glob("cache/*/*.v1"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt: ``logits`` has the bytes of each step's ``[1, V]``, none if they were not kept;
    ``fetched`` is what the tier read for it."""

    asked: Asked
    logits: tuple[bytes, ...]
    fetched: tuple[PartsFetched, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What one of the two processes does: ``first`` computes and writes, the other reads."""

    tokens: int
    rounds: int
    chunk_tokens: int
    logits: bool
    first: bool


def run_half(subject: Subject, model: LoadedModel, folder: Path, half: Half) -> list[Answered]:
    """The answers to ``half.rounds`` prompts, which are the same in both halves."""
    chance = random.Random(half.tokens)
    vocabulary = subject.description.vocab_size
    prompts = [[chance.randrange(vocabulary) for _ in range(half.tokens)] for _ in range(half.rounds + 2)]
    options = EngineOptions(
        chunk_tokens=half.chunk_tokens,
        max_rows=2,
        packed=False,
        compiled=False if half.logits else None,
    )
    most = longest([half.tokens + ANSWER_TOKENS], subject.description)
    recording = RecordingModel(model) if half.logits else None
    readings = Readings()
    answered = []
    with engine_over(subject, recording or model, folder, options, most, readings) as (asks, tier):
        asks.ask(prompts[0 if half.first else 1])
        for prompt in prompts[2:]:
            if not half.first:
                drop_caches(folder)
            readings.kept.clear()
            if recording:
                recording.kept.clear()
            asked = asks.ask(prompt)
            kept = recording.kept[:ANSWER_TOKENS] if recording else []
            logits = tuple(bytes(memoryview(cast(Any, each))) for each in kept)
            answered.append(Answered(asked, logits, tuple(readings.kept)))
            time.sleep(0.1)
            if half.first:
                tier.settle(120)
    return answered


def run_second(command: list[str], folder: Path, half: Half) -> list[Answered]:
    """The second half, in a process of its own."""
    work = folder / "second.pickle"
    work.write_bytes(pickle.dumps((folder, half)))
    subprocess.run([sys.executable, *command, "--second", str(work)], check=True)
    found: list[Answered] = pickle.loads(work.read_bytes())
    return found


def show(name: str, tokens: int, cold: Sequence[Answered], warm: Sequence[Answered]) -> bool:
    """A line for a length and one for each round; whether every answer, and every logit that was kept, is the same."""
    pairs = list(zip(cold, warm, strict=True))
    before = statistics.median(each.asked.seconds for each in cold) * 1000
    after = statistics.median(each.asked.seconds for each in warm) * 1000
    slowest = max(two.asked.seconds / one.asked.seconds for one, two in pairs)
    cached = min(each.asked.cached for each in warm)
    same = all(one.asked.answer == two.asked.answer for one, two in pairs)
    steps = [step for one, two in pairs for step in zip(one.logits, two.logits, strict=True)]
    differ = sum(one != two for one, two in steps)
    print(
        f"{name}, {tokens} tokens: cold {before:.0f} ms, from disk {after:.0f} ms ({cached} tokens cached), "
        f"{before / after:.1f} times as fast; the slowest hit took {slowest:.0%} of its cold time; "
        f"answers {'the same' if same else 'DIFFER'}"
        + (f"; logits of {differ} of {len(steps)} steps differ" if steps else ""),
        flush=True,
    )
    for number, (one, two) in enumerate(pairs, 1):
        seconds = sum(each.duration_seconds for each in two.fetched)
        size = sum(each.size_bytes for each in two.fetched)
        read = "nothing read"
        if seconds:
            read = f"{size / MEBIBYTE:.0f} MiB read in {seconds * 1000:.0f} ms, {size / seconds / MEBIBYTE:.0f} MiB/s"
        print(
            f"  round {number}: cold {one.asked.seconds * 1000:.0f} ms, from disk {two.asked.seconds * 1000:.0f} ms, "
            f"{two.asked.cached} tokens cached, {read}",
            flush=True,
        )
    return same and not differ


def main() -> None:
    """Measure one model at each length."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = arguments.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--model")
    chosen.add_argument("--shape")
    arguments.add_argument("--folder", type=Path, default=None, help="a folder on the disk to measure")
    arguments.add_argument("--prompt-tokens", default="512,2048,8192")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--chunk-tokens", type=int, default=256)
    arguments.add_argument("--logits", action="store_true", help="compare the logits of every answer, too")
    arguments.add_argument("--second", type=Path, default=None, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    plugins, device = load_plugins(), current_device()
    if given.shape:
        subject = shape_subject(given.shape, plugins, device)
    else:
        places = ModelPlaces(hub=hub_folder(os.environ), aliases={}, offered=plugins.checkpoints())
        subject = checkpoint_subject(given.model, places, plugins, device)
    mx.random.seed(1)  # random weights are the same in both processes
    model = subject.load()
    if given.second:
        folder, half = pickle.loads(given.second.read_bytes())
        given.second.write_bytes(pickle.dumps(run_half(subject, model, folder, half)))
        return
    same = True
    for tokens in map(int, given.prompt_tokens.split(",")):
        folder = Path(tempfile.mkdtemp(prefix="measure-ssd-", dir=given.folder))
        half = Half(
            tokens=tokens,
            rounds=given.rounds,
            chunk_tokens=given.chunk_tokens,
            logits=given.logits,
            first=True,
        )
        try:
            cold = run_half(subject, model, folder, half)
            warm = run_second(sys.argv, folder, replace(half, first=False))
        finally:
            shutil.rmtree(folder)
        same &= show(subject.name, tokens, cold, warm)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
