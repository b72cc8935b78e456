"""Load a checkpoint and generate a few tokens; print seconds and peak memory as shares of the weights' size.

python tools/measure_load.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import mlx.core as mx
import psutil

from darkbloom_core.checkpoint import Weights, read_config
from darkbloom_core.contracts import Placement, Prompt
from darkbloom_core.engine import Engine, EngineOptions, GenerationRequest, PlainParser, SamplingParams
from darkbloom_core.plugins import load_plugins
from darkbloom_core.slots import current_device


def main() -> None:
    folder = Path(sys.argv[1])
    config = read_config(folder)
    device = current_device()
    family = load_plugins().family_for(config)
    description = family.describe(config, device)
    disk = Weights(folder).disk_bytes
    mx.reset_peak_memory()
    began = time.monotonic()
    engine = Engine(
        folder.name,
        family.codec(folder, description),
        lambda: family.load(folder, description, Placement(device)),
        EngineOptions(max_rows=1),
    )
    weights = engine.load_model()
    seconds = time.monotonic() - began
    peak = mx.get_peak_memory()
    print(f"loaded {weights} bytes ({disk} on disk) in {seconds:.1f} s, {weights / seconds / 1e9:.2f} GB/s")
    print(f"peak of MLX {peak} bytes, {peak / weights:.3f} x the weights")
    print(f"resident in the host {psutil.Process().memory_info().rss} bytes")
    began = time.monotonic()
    engine.start(8 << 30)
    print(f"warm in {time.monotonic() - began:.1f} s: {engine.status().choices}")
    stream = engine.submit(
        GenerationRequest(
            id="a",
            prompt=Prompt(tuple(range(100, 612))),
            parser=PlainParser(),
            max_tokens=64,
            sampling=SamplingParams(temperature=0.0),
            ignore_stop_ids=True,
        )
    )
    end = list(stream)[-1]
    print(f"generated {end.usage.completion_tokens} tokens: {end.timings}")
    engine.close()


if __name__ == "__main__":
    main()
