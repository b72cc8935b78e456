"""Two demo models loaded and unloaded in turn, hundreds of times: memory comes back."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import mlx.core as mx
import psutil
import pytest
from soak import curve, keep, length

from darkbloom_core.contracts import Chat, Message, TextPart
from darkbloom_core.engine import GenerationRequest, SamplingParams
from darkbloom_core.memory import FixedReadings, clear_caches
from darkbloom_core.plugins import load_plugins
from darkbloom_core.settings import Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SETTLED = 5
"""The cycle from which on memory must not grow by more than what follows."""

GROWTH = 1.03
"""Of the least of ``SETTLED`` cycles: some are 6 MiB above others, as malloc keeps an arena or not."""

CYCLE_BYTES = 48 * 1024
"""What a cycle may leave behind for good: each tokenizer of tokenizers 0.23 leaves about 10 KiB to the threads
that encoded with it, as long as they live, and 20 to 35 were seen of a whole cycle."""


def answer(slot) -> int:
    """One short answer; gives how many tokens it had."""
    chat = Chat(messages=(Message(role="user", content=(TextPart("What is 12 + 30?"),)),))
    stream = slot.engine.submit(
        GenerationRequest(
            id="soak",
            prompt=slot.codec.encode_chat(chat),
            parser=slot.codec.parser(chat),
            max_tokens=20,
            sampling=SamplingParams(temperature=0.0),
        )
    )
    return list(stream)[-1].usage.completion_tokens


def run_cycles(cycles: int) -> dict[str, list[int]]:
    """Resident bytes and threads of this process after each cycle."""
    plugins, process = load_plugins(), psutil.Process()
    settings = Settings(
        telemetry={"sample_seconds": 0}, engine={"chain": "always", "pack": "never", "max_rows": 4}
    )
    readings = FixedReadings(16 * 2**30, on_clear=clear_caches)  # whatever else this machine does meanwhile
    slots = SlotManager(settings, plugins.family_for, SinkEmitter([]), readings)
    models = sorted(plugins.checkpoints().items())
    mx.clear_cache()
    active_before = mx.get_active_memory()
    resident: list[int] = []
    threads: list[int] = []
    try:
        for cycle in range(cycles):
            name, path = models[cycle % len(models)]
            assert answer(slots.load(name, path)) > 0
            slots.unload(name)
            gc.collect()
            assert mx.get_active_memory() <= active_before, f"cycle {cycle} left arrays behind"
            resident.append(process.memory_info().rss)
            threads.append(process.num_threads())
    finally:
        slots.close()
    return {"resident_bytes": resident, "threads": threads}


def test_memory_comes_back_after_every_cycle_of_two_models() -> None:
    """In a process of its own, whose memory no other test has used."""
    cycles = length(200, 20)
    done = subprocess.run(
        [sys.executable, __file__, str(cycles)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    resident, threads = found["resident_bytes"], found["threads"]
    pair = 2
    settled, last = min(resident[SETTLED - 1 : 2 * SETTLED - 1]), min(resident[-SETTLED:])
    most = max(threads[: 2 * SETTLED]), max(threads[-2 * SETTLED :])  # one may just be ending
    keep(
        "slots-load-unload",
        f"{cycles} cycles; resident {settled / 2**20:.1f} MiB after {SETTLED}, {last / 2**20:.1f} at the end, "
        f"at most {most[0]} threads and {most[1]} {curve(resident[:: max(pair, cycles // 40 // pair * pair)])}",
        {"cycles": cycles, "resident_bytes": resident, "threads": threads},
    )
    assert last <= GROWTH * settled + CYCLE_BYTES * cycles, (settled, last)
    assert most[1] <= most[0], threads


if __name__ == "__main__":
    json.dump(run_cycles(int(sys.argv[1])), sys.stdout)
