"""Requests of random lengths after warm-up: exit 1 if any of them makes MLX compile a kernel.

    python tools/check_compiles.py --shape gpt-oss-20b [--requests 200] [--rows 8]

On CUDA, where MLX keeps each module that it compiled as files in ``MLX_PTX_CACHE_DIR``. The
folder must be empty, so that nothing is there before warm-up; a new one is made if none is named.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(os.environ.get("MLX_PTX_CACHE_DIR") or tempfile.mkdtemp(prefix="darkbloom-compiled-"))
FOLDER.mkdir(parents=True, exist_ok=True)
if any(FOLDER.iterdir()):
    sys.exit(f"{FOLDER} holds compiled modules already")
os.environ["MLX_PTX_CACHE_DIR"] = str(FOLDER)  # before MLX looks

from darkbloom_bench._ours import NumberCodec  # noqa: E402
from darkbloom_bench._subject import checkpoint_subject, shape_subject  # noqa: E402

from darkbloom_core.contracts import Prompt  # noqa: E402
from darkbloom_core.engine import (  # noqa: E402
    Engine,
    EngineOptions,
    GenerationRequest,
    PlainParser,
    SamplingParams,
    lane_bytes,
    row_bytes,
)
from darkbloom_core.plugins import load_plugins  # noqa: E402
from darkbloom_core.slots import ModelPlaces, current_device, hub_folder  # noqa: E402

LONGEST_PROMPT, MOST_TOKENS = 1500, 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--shape")
    which.add_argument("--model")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8)
    asked = parser.parse_args()

    plugins, device = load_plugins(), current_device()
    places = ModelPlaces(hub=hub_folder(os.environ), offered=plugins.checkpoints())
    subject = (
        shape_subject(asked.shape, plugins, device)
        if asked.shape
        else checkpoint_subject(asked.model, places, plugins, device)
    )
    layers = subject.description.layers
    engine = Engine(
        subject.name,
        NumberCodec(subject.description.vocab_size),
        subject.load,
        EngineOptions(max_rows=asked.rows),
    )
    engine.load_model()
    began = time.monotonic()
    engine.start(2 * asked.rows * (lane_bytes(layers) + row_bytes(layers, LONGEST_PROMPT + MOST_TOKENS)))
    before = _modules()
    print(
        f"{subject.name} on {device.kind}: warm in {time.monotonic() - began:.0f} s, {len(before)} modules; "
        f"{engine.status().choices}"
    )
    chance, began = random.Random(1), time.monotonic()
    longest_wait = 0.0
    waiting = []
    for number in range(asked.requests):
        tokens = tuple(
            chance.randrange(subject.description.vocab_size) for _ in range(chance.randint(1, LONGEST_PROMPT))
        )
        stream = engine.submit(
            GenerationRequest(
                id=str(number),
                prompt=Prompt(tokens),
                parser=PlainParser(),
                max_tokens=chance.randint(1, MOST_TOKENS),
                sampling=SamplingParams(temperature=chance.choice((0.0, 1.0)), seed=number),
                ignore_stop_ids=True,
            )
        )
        waiting.append(stream)
        if len(waiting) == asked.rows:
            longest_wait = max(longest_wait, _drain(waiting))
    _drain(waiting)
    engine.close()
    new = _modules() - before
    print(
        f"{asked.requests} requests in {time.monotonic() - began:.0f} s, the longest group of {asked.rows} took "
        f"{longest_wait:.1f} s; compiled since: {sorted(new) or 'nothing'}"
    )
    sys.exit(1 if new else 0)


def _drain(streams: list) -> float:
    began = time.monotonic()
    for stream in streams:
        list(stream)
    streams.clear()
    return time.monotonic() - began


def _modules() -> set[str]:
    return {file.name for file in FOLDER.iterdir()}


if __name__ == "__main__":
    main()
