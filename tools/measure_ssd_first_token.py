"""Time to the first token of prompts that only the disk knows, next to the same prompts computed cold.

One engine computes random prompts, and the tier writes them; another one, over the same
weights and the same folder, begins with nothing in memory and answers them again, page cache
dropped before each. Both have answered another prompt of that length before, so that kernels
are built and prefill's speed is known. Answers must be the same.

    uv run python tools/measure_ssd_first_token.py --model demo/gpt-oss --folder /on/the/disk
    uv run python tools/measure_ssd_first_token.py --shape gpt-oss-20b --prompt-tokens 8192
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from darkbloom_bench._first_token import ANSWER_TOKENS, Asked, OurPrompts
from darkbloom_bench._ours import NumberCodec
from darkbloom_bench._subject import Subject, checkpoint_subject, longest, shape_subject
from darkbloom_ssd_tier._store import Stores
from darkbloom_ssd_tier._tier import SsdTier, SsdTierFactory

from darkbloom_core.contracts import LoadedModel, TierContext
from darkbloom_core.engine import Engine, EngineOptions, PrefixOptions, lane_bytes, row_bytes
from darkbloom_core.plugins import load_plugins
from darkbloom_core.prefix import Numerics
from darkbloom_core.slots import ModelPlaces, current_device, hub_folder
from darkbloom_core.telemetry import SinkEmitter


def open_tier(folder: Path) -> SsdTier:
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
        emitter=SinkEmitter(),
    )
    tier = SsdTierFactory(Stores()).open(context)
    tier.settle()
    return tier


@contextmanager
def engine_over(
    subject: Subject, model: LoadedModel, folder: Path, options: EngineOptions, most_tokens: int
) -> Iterator[tuple[OurPrompts, SsdTier]]:
    """An engine with nothing in memory, over what is in ``folder``."""
    layers = subject.description.layers
    tier = open_tier(folder)
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


def measure(
    subject: Subject, model: LoadedModel, folder: Path, tokens: int, rounds: int, chunk_tokens: int
) -> list[tuple[Asked, Asked]]:
    """Cold and from disk, for each of ``rounds`` prompts."""
    chance = random.Random(tokens)
    vocabulary = subject.description.vocab_size
    prompts = [[chance.randrange(vocabulary) for _ in range(tokens)] for _ in range(rounds + 2)]
    options = EngineOptions(chunk_tokens=chunk_tokens, max_rows=2, packed=False)
    most = longest([tokens + ANSWER_TOKENS], subject.description)
    with engine_over(subject, model, folder, options, most) as (asks, tier):
        asks.ask(prompts[0])
        cold = []
        for prompt in prompts[2:]:
            cold.append(asks.ask(prompt))
            time.sleep(0.1)
            tier.settle(120)
    with engine_over(subject, model, folder, options, most) as (asks, _):
        asks.ask(prompts[1])
        warm = []
        for prompt in prompts[2:]:
            drop_caches(folder)
            warm.append(asks.ask(prompt))
    return list(zip(cold, warm, strict=True))


def show(name: str, tokens: int, found: Sequence[tuple[Asked, Asked]]) -> None:
    """One line for a length."""
    cold = statistics.median(each.seconds for each, _ in found) * 1000
    warm = statistics.median(each.seconds for _, each in found) * 1000
    slowest = max(after.seconds / before.seconds for before, after in found)
    cached = min(after.cached for _, after in found)
    same = all(before.answer == after.answer for before, after in found)
    print(
        f"{name}, {tokens} tokens: cold {cold:.0f} ms, from disk {warm:.0f} ms ({cached} tokens cached), "
        f"{cold / warm:.1f} times as fast; the slowest hit took {slowest:.0%} of its cold time; "
        f"answers {'the same' if same else 'DIFFER'}",
        flush=True,
    )


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
    given = arguments.parse_args()
    plugins, device = load_plugins(), current_device()
    if given.shape:
        subject = shape_subject(given.shape, plugins, device)
    else:
        places = ModelPlaces(hub=hub_folder(os.environ), aliases={}, offered=plugins.checkpoints())
        subject = checkpoint_subject(given.model, places, plugins, device)
    model = subject.load()
    for tokens in map(int, given.prompt_tokens.split(",")):
        folder = Path(tempfile.mkdtemp(prefix="measure-ssd-", dir=given.folder))
        try:
            found = measure(subject, model, folder, tokens, given.rounds, given.chunk_tokens)
        finally:
            shutil.rmtree(folder)
        show(subject.name, tokens, found)


if __name__ == "__main__":
    main()
