"""Measure what a decode step costs on the host, by phase: everything but waiting for the device.

    python tools/measure_host_work.py [--model toy] [--rows 1,8,32] [--steps-are unfused] [--profile] [--json FILE]

``--model`` is ``toy`` (six tiny layers of every kind, so that the host is all there is) or a
checkpoint of the demo package by its folder's name; ``--steps-are`` eager, or compiled with
their operations as they are or fused, which on a CPU runs g++ at first. Phases are timed by wrapping methods from
outside, exclusively: a phase inside another is not counted twice. The engine itself is untouched.
Processor time is that of the engine's thread; wall time holds its waits for the device, for
locks and for the interpreter as well.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import mlx.core as mx  # noqa: E402  # after the path
from darkbloom_bench._machine import this_machine  # noqa: E402
from toy_family import VOCABULARY, ToyCodec, ToyModel, full, recurrent, window  # noqa: E402

from darkbloom_core.contracts import Chat, ChatCodec, LoadedModel, Message, Placement, TextPart  # noqa: E402
from darkbloom_core.engine import (  # noqa: E402
    Engine,
    EngineOptions,
    GenerationRequest,
    OutputStream,
    PlainParser,
    SamplingParams,
    _live,
    _runner,
)
from darkbloom_core.slots import current_device  # noqa: E402

CHECKPOINTS = ROOT / "plugins" / "demo" / "darkbloom_demo" / "checkpoints"
TOY_LAYERS = (window(8, sinks=True), full(), window(16), full(source=1), recurrent(), window(8, source=0))
PHASES = ("build", "launch", "wait", "read", "text and stream", "between steps")
PROMPT_TOKENS = 40
WARM_STEPS = 30


class PhaseClock:
    """Wall and processor seconds of one thread by phase, while it runs. Only that thread calls it."""

    def __init__(self, steps: int, profile: cProfile.Profile | None) -> None:
        self._steps = steps
        self._profile = profile
        self._phase = "between steps"
        self._thread: int | None = None
        self._counted = 0
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.process = 0.0
        self.done = threading.Event()

    def begin(self) -> None:
        """Called on the engine's thread: count from here on."""
        self._thread = threading.get_ident()
        self._wall_at, self._cpu_at = time.perf_counter(), time.thread_time()
        self.process = -time.process_time()
        if self._profile is not None:
            self._profile.enable()

    def step(self) -> None:
        """Called at the head of each decode step of all rows."""
        self._counted += 1
        if self._counted == WARM_STEPS:
            self.begin()
        elif self._counted == WARM_STEPS + self._steps:
            if self._profile is not None:
                self._profile.disable()
            self.switch("between steps")
            self._thread = None
            self.process += time.process_time()
            self.done.set()

    def switch(self, phase: str) -> str:
        """Enter ``phase``; returns the one that was left."""
        left = self._phase
        if self._thread == threading.get_ident():
            wall, cpu = time.perf_counter(), time.thread_time()
            self.wall[left] += wall - self._wall_at
            self.cpu[left] += cpu - self._cpu_at
            self._wall_at, self._cpu_at = wall, cpu
        self._phase = phase
        return left

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            left = self.switch(phase)
            try:
                return function(*arguments, **options)
            finally:
                self.switch(left)

        return run


class TimedMlx:
    """``mlx.core`` as the runner sees it, with the two calls that matter timed."""

    def __init__(self, clock: PhaseClock) -> None:
        self.eval = clock.timed("wait", mx.eval)
        self.async_eval = clock.timed("launch", mx.async_eval)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


class Wrapped:
    """The engine's methods, timed for the length of a ``with``; ``profiled``, only steps are counted."""

    def __init__(self, clock: PhaseClock, rows: int, *, profiled: bool) -> None:
        self._profiled = profiled
        self._clock = clock
        self._rows = rows
        self._saved: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        clock, decode = self._clock, _runner.Runner.decode

        def counted(runner: Any, lives: tuple[Any, ...]) -> None:
            if len(lives) == self._rows:
                clock.step()
            decode(runner, lives)

        self._set(_runner.Runner, "decode", counted)
        if self._profiled:
            return
        self._set(_runner.Runner, "_build_decode", clock.timed("build", _runner.Runner._build_decode))
        self._set(_runner.Runner, "_read", clock.timed("read", _runner.Runner._read))
        self._set(_live.Live, "take_token", clock.timed("text and stream", _live.Live.take_token))
        self._set(_runner, "wake_readers", clock.timed("text and stream", _runner.wake_readers))
        self._set(_runner, "mx", TimedMlx(clock))

    def __exit__(self, *fault: object) -> None:
        for owner, name, value in reversed(self._saved):
            setattr(owner, name, value)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


class Readers:
    """An event loop in a thread of its own that reads every stream, as the server's does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def read(self, stream: OutputStream) -> Any:
        async def to_the_end() -> None:
            async for _ in stream:
                pass

        return asyncio.run_coroutine_threadsafe(to_the_end(), self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Subject:
    """A model with its codec, and requests for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.codec: ChatCodec
        self.load: Callable[[], LoadedModel]
        if name == "toy":
            self.codec = ToyCodec()  # type: ignore[assignment]  # a toy has no chats
            self.load = lambda: ToyModel(TOY_LAYERS)  # type: ignore[assignment,return-value]
        else:
            from darkbloom_core.checkpoint import read_config
            from darkbloom_core.plugins import load_plugins

            folder, device = CHECKPOINTS / name, current_device()
            config = read_config(folder)
            family = load_plugins().family_for(config)
            description = family.describe(config, device)
            self.codec = family.codec(folder, description)
            self.load = lambda: family.load(folder, description, Placement(device))

    def request(self, name: str, tokens: int) -> GenerationRequest:
        if self.name == "toy":
            from darkbloom_core.contracts import Prompt

            prompt, parser = Prompt(tuple(range(1, PROMPT_TOKENS))), PlainParser()
            assert VOCABULARY > PROMPT_TOKENS
        else:
            chat = Chat(messages=(Message(role="user", content=(TextPart("What is 12 + 30?"),)),))
            prompt, parser = self.codec.encode_chat(chat), self.codec.parser(chat)
        return GenerationRequest(
            id=name,
            prompt=prompt,
            parser=parser,
            max_tokens=tokens,
            sampling=SamplingParams(temperature=0.0),
            ignore_stop_ids=True,
        )


def measure(
    subject: Subject, engine: Engine, rows: int, steps: int, profile: cProfile.Profile | None
) -> dict[str, Any]:
    """Milliseconds per decode step of ``rows`` rows by phase; processor time of the whole process beside it."""
    clock, readers = PhaseClock(steps, profile), Readers()
    with Wrapped(clock, rows, profiled=profile is not None):
        streams = [
            engine.submit(subject.request(f"row {number}", WARM_STEPS + steps + rows + 40))
            for number in range(rows)
        ]
        reading = [readers.read(stream) for stream in streams]
        clock.done.wait(300)
        for stream in streams:
            stream.cancel()
        for future in reading:
            future.result()
    readers.close()
    while engine.status().running:
        time.sleep(0.001)
    per_step = 1000 / steps
    return {
        "rows": rows,
        "wall": {phase: clock.wall[phase] * per_step for phase in PHASES},
        "cpu": {phase: clock.cpu[phase] * per_step for phase in PHASES},
        "process": clock.process * per_step,
    }


def host(cell: dict[str, Any], kind: str) -> float:
    """Milliseconds of everything but waiting for the device."""
    return sum(value for phase, value in cell[kind].items() if phase != "wait")


def main() -> None:
    arguments = parsed()
    subject = Subject(arguments.model)
    rows = [int(word) for word in arguments.rows.split(",")]
    options = EngineOptions(
        max_rows=max(rows),
        event_buffer=4096,
        compiled=arguments.steps_are != "eager",
        fused=arguments.steps_are == "fused",
        chained=arguments.chained,
    )
    engine = Engine(subject.name, subject.codec, subject.load, options)
    engine.load_model()
    engine.start(1 << 30)
    print(f"{subject.name} on {this_machine(current_device())}, load {os.getloadavg()[0]:.1f}")
    print(engine.status().choices)
    cells = []
    for count in rows:
        repeats = [measure(subject, engine, count, arguments.steps, None) for _ in range(arguments.repeats)]
        cells.append(middle(repeats))
    show(cells)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"model": subject.name, "cells": cells}) + "\n")
    if arguments.profile:
        for count in rows:
            profile = cProfile.Profile()
            measure(subject, engine, count, arguments.steps, profile)
            print(f"\n{count} rows, {arguments.steps} steps, the engine's thread by own time:")
            pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(18)
    engine.close()


def middle(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repeats, phase by phase."""
    return {
        "rows": repeats[0]["rows"],
        **{
            kind: {phase: statistics.median(one[kind][phase] for one in repeats) for phase in PHASES}
            for kind in ("wall", "cpu")
        },
        "process": statistics.median(one["process"] for one in repeats),
    }


def show(cells: list[dict[str, Any]]) -> None:
    """A table in Markdown, milliseconds per step: wall / processor of the engine's thread; then the process's processor time."""
    print("\n| rows | " + " | ".join(PHASES) + " | all but wait | whole process |")
    print("|---|" + "---|" * (len(PHASES) + 2))
    for cell in cells:
        phases = [f"{cell['wall'][phase]:.3f} / {cell['cpu'][phase]:.3f}" for phase in PHASES]
        total = f"{host(cell, 'wall'):.3f} / {host(cell, 'cpu'):.3f}"
        print(f"| {cell['rows']} | " + " | ".join(phases) + f" | {total} | {cell['process']:.3f} |")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Host work of decode steps, by phase.")
    parser.add_argument("--model", default="toy")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chained", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--steps-are", choices=("eager", "unfused", "fused"), default="eager")
    return parser.parse_args()


if __name__ == "__main__":
    main()
