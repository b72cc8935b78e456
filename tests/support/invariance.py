"""Rows beside neighbours against rows alone: for every checkpoint of an installed family, a random model of each, and toys.

As a program it does the same in a process of its own, so that another BLAS can be put
before the one that MLX brings, and prints what it found as JSON:

    LD_PRELOAD=libopenblas.so.0 python tests/support/invariance.py --mode default --schedules 200 demo/gpt-oss
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from darkbloom_bench._offers import RandomFamily
from hypothesis import HealthCheck, Phase, given, settings
from schedules import Asked, Got, Stage, schedules
from toy_family import VOCABULARY, ToyCodec, ToyModel, full, recurrent, window

from darkbloom_core.contracts import Chat, Device, Message, ModelFamily, Placement, TextPart
from darkbloom_core.plugins import load_plugins

TOYS = {
    "toy/full": [full(), full(sinks=True)],
    "toy/windows": [window(8), full(), window(16, sinks=True)],
    "toy/borrowing": [window(8), full(), window(8, source=0), full(source=1)],
    "toy/recurrent": [recurrent(), full(), window(8), recurrent()],
}

MOST_TOKENS = 24
"""Tokens of an output. Windows are 8 and 16 in toys and random models; in checkpoints 128, and prompts around that."""

ROUNDING = 1e-4
"""By how much of the largest logit two ways to add the same products may differ."""

MODES = {
    "default": {"compiled": False, "chained": False, "packed": False, "slice_seconds": 1e-9},
    "together": {"compiled": False, "chained": True, "packed": True, "slice_seconds": 1e3},
    "compiled": {"compiled": True, "chained": True, "packed": False, "slice_seconds": 1e3},
    "deterministic": {"deterministic": True, "slice_seconds": 1e-9},
}
"""``default`` and ``together`` are the two ends of what warm-up may choose; a chunk runs a layer at a time or whole.

``compiled`` has graphs for one row and for several, which on the CPU backend are not fused."""


@dataclass
class Comparison:
    """What was compared, and what was not equal. Tokens are those of rows beside neighbours."""

    subject: str
    mode: str
    blas: str
    schedules: int = 0
    rows: int = 0
    tokens: int = 0
    decode_steps: int = 0
    largest_batch: int = 0
    wrong: list[str] = field(default_factory=list)
    ties: int = 0
    logits: int = 0
    logits_with_other_bits: int = 0
    largest_difference: float = 0.0

    def add(self, row: Asked, got: Got, alone: Got) -> None:
        """Count one row."""
        self.rows += 1
        self.tokens += len(got.tokens)
        cancelled = got.reason == "cancelled"
        expected = alone.tokens[: len(got.tokens)] if cancelled else alone.tokens
        if got.tokens != expected or (not cancelled and got.reason != alone.reason):
            if self.mode != "deterministic" and _is_a_tie(got, alone):
                self.ties += 1
                return
            self.wrong.append(f"{row}: {got.tokens} ({got.reason}), alone {alone.tokens} ({alone.reason})")
        for one, other in zip(got.logits, alone.logits, strict=False):  # a cancelled row has fewer
            self.logits += 1
            self.logits_with_other_bits += not np.array_equal(one, other)
            self.largest_difference = max(self.largest_difference, float(np.abs(one - other).max()))


def _is_a_tie(got: Got, alone: Got) -> bool:
    """Whether the first token that differs was drawn from the same logits but for rounding, so that two came out equal."""
    pairs = zip(got.tokens, alone.tokens, strict=False)
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if first is None or first >= min(len(got.logits), len(alone.logits)):
        return False
    one, other = got.logits[first], alone.logits[first]
    return float(np.abs(one - other).max()) <= ROUNDING * float(np.abs(other).max())


@dataclass
class Subject:
    """A running stage, what to ask it, and how far a row goes."""

    name: str
    mode: str
    stage: Stage
    prompts: Sequence[tuple[int, ...]]
    most_tokens: int

    def is_at_rest(self) -> bool:
        """Whether nothing runs or waits, and only the slabs are reserved."""
        status = self.stage.engine.status()
        return status.running == status.waiting == 0 and status.kv_bytes_reserved == status.kv_bytes_used

    def compare(self, count: int, part: int = 0) -> Comparison:
        """Play ``count`` generated schedules, for each ``part`` the same ones every time."""
        found = Comparison(self.name, self.mode, blas())

        @settings(
            max_examples=count,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(schedule=schedules(self.prompts, self.most_tokens, part))
        def play(schedule: list[Asked]) -> None:
            self.add(found, schedule)

        play()
        return found

    def add(self, found: Comparison, schedule: Sequence[Asked]) -> None:
        """Play one schedule and count what came of it."""
        found.schedules += 1
        before = self.stage.engine.status().decode_steps
        outputs = self.stage.play(schedule)
        status = self.stage.engine.status()
        found.decode_steps += status.decode_steps - before
        found.largest_batch = status.largest_batch
        for row, got in zip(schedule, outputs, strict=True):
            found.add(row, got, self.stage.alone(row))


def names() -> list[str]:
    """Every checkpoint that an installed package brings, of whatever family, and a small random model like it."""
    checkpoints = sorted(load_plugins().checkpoints())
    return checkpoints + [
        f"random/{name}" for name in checkpoints if isinstance(_family(name)[0], RandomFamily)
    ]


def open_subject(name: str, mode: str, *, most_tokens: int | None = None, **options) -> Subject:
    """Load and start what is called ``name``; close its ``stage`` in the end.

    A row has at most ``most_tokens`` tokens of output; None is long enough to cross windows.
    """
    make = _toy if name in TOYS else _random if name.startswith("random/") else _checkpoint
    return make(name, mode, most_tokens or 60, {**MODES[mode], **options})


def _toy(name: str, mode: str, most_tokens: int, options: dict) -> Subject:
    prompts = [noise(length, seed) for seed, length in enumerate([1, 3, 7, 8, 9, 15, 17, 31, 40, 52])]
    model = ToyModel(TOYS[name], stop_ids=frozenset({5, 11}))
    options = {"max_rows": 4, "chunk_tokens": 16, **options}
    stage = Stage(lambda: model, ToyCodec(), most_tokens=most_tokens, **options)
    return Subject(name, mode, stage, prompts, most_tokens)


def noise(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    """Random tokens."""
    return tuple(np.random.default_rng(seed).integers(0, vocabulary, length).tolist())


def _family(name: str) -> tuple[ModelFamily, Path, dict]:
    plugins = load_plugins()
    path = plugins.checkpoints()[name]
    config = json.loads((path / "config.json").read_text())
    return plugins.family_for(config), path, config


def _checkpoint(name: str, mode: str, most_tokens: int, options: dict) -> Subject:
    (family, path, config), device = _family(name), Device("cpu")
    description = family.describe(config, device)
    codec = family.codec(path, description)
    chats = [_chat(turns, seed) for seed, turns in enumerate((0, 0, 0, 0, 1, 1, 2, 4, 14))]
    stage = Stage(
        lambda: family.load(path, description, Placement(device)),
        codec,
        most_tokens=most_tokens,
        parser=lambda: codec.parser(chats[0]),
        **{"chunk_tokens": 96, **options},
    )
    return Subject(name, mode, stage, [codec.encode_chat(chat).ids for chat in chats], most_tokens)


def _random(name: str, mode: str, most_tokens: int, options: dict) -> Subject:
    """A model like the checkpoint's, of random weights, with windows of 16 and, where it may, two layers that borrow."""
    (family, path, config), device = _family(name.removeprefix("random/")), Device("cpu")
    assert isinstance(family, RandomFamily)
    codec = family.codec(path, family.describe(config, device))
    model = config.get("text_config", config)
    model["sliding_window"] = 16
    if "num_kv_shared_layers" in model:
        model["num_kv_shared_layers"] = 2
        model.pop("per_layer_config", None)  # who borrows has the heads of whom it borrows from
        model["layer_types"][-3] = model["layer_types"][-1]
    description = family.describe(config, device)

    def load():
        mx.random.seed(1)
        return family.load_random(description, Placement(device))

    lengths = [1, 2, 9, 15, 16, 17, 31, 33, 50, 64]
    prompts = [noise(length, seed, description.vocab_size) for seed, length in enumerate(lengths)]
    stage = Stage(load, codec, most_tokens=most_tokens, **{"chunk_tokens": 32, **options})
    return Subject(name, mode, stage, prompts, most_tokens)


def _chat(turns: int, seed: int) -> Chat:
    """A question after so many answered ones."""
    from darkbloom_demo import checked_prompts

    chosen = random.Random(seed).sample(checked_prompts(), turns + 1)
    messages = []
    for prompt in chosen:
        messages += [("user", prompt.question), ("assistant", prompt.contains)]
    return Chat(messages=tuple(Message(role=role, content=(TextPart(text),)) for role, text in messages[:-1]))


def blas() -> str:
    """Whether OpenBLAS was put before the BLAS that MLX brings, from what the process has mapped."""
    maps = Path("/proc/self/maps")
    return "openblas" if maps.exists() and "libopenblas" in maps.read_text() else "own"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("subjects", nargs="+")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--schedules", type=int, required=True)
    parser.add_argument("--part", type=int, default=0)
    asked = parser.parse_args()
    found = []
    for name in asked.subjects:
        subject = open_subject(name, asked.mode, most_tokens=MOST_TOKENS)
        found.append(asdict(subject.compare(asked.schedules, asked.part)))
        subject.stage.close()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
