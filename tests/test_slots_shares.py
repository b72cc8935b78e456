"""Shares over random sets of models that come and go: never more than the budget, whoever looks, whenever."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from toy_family import describe, full, recurrent, window
from toy_server import ToyChatCodec

from darkbloom_core.engine import Engine, EngineOptions, SamplingParams
from darkbloom_core.errors import GrantTooSmall
from darkbloom_core.memory import FixedReadings
from darkbloom_core.settings import MemorySettings
from darkbloom_core.slots import Slot
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.telemetry import SinkEmitter

GIB = 1024**3
CODEC = ToyChatCodec()

LAYERS = st.lists(
    st.sampled_from([full(), full(kv_heads=4), window(16), recurrent()]), min_size=1, max_size=4
)


class Watched(Engine):
    """An engine that never runs; ``on_resize`` is called after every change of its grant."""

    on_resize = staticmethod(lambda: None)

    def resize(self, grant_bytes: int) -> None:
        super().resize(grant_bytes)
        self.on_resize()


class Shares:
    """Slots that come and go on a machine of a given size; every change of a grant is looked at."""

    def __init__(self, physical_gib: int) -> None:
        self.numbers = itertools.count()
        self.slots: list[Slot] = []
        self.memory = SlotMemory(
            MemorySettings(),
            FixedReadings(physical_gib * GIB),
            lambda: self.slots,
            lambda: None,
            SinkEmitter([]),
        )
        self.allowed_bytes = self.memory.budget()

    def grants(self) -> int:
        return sum(slot.engine.status().kv_bytes_grant for slot in self.slots)

    def look(self) -> None:
        """Those that shrink bring the sum down from the last budget; once one has grown the new one holds."""
        now, budget = self.grants(), self.memory.budget()
        assert now <= max(self.allowed_bytes, budget)
        self.allowed_bytes = now if now > budget else budget

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """A change in the block leaves every grant within the budget, and what slots say is what engines have."""
        self.allowed_bytes = max(self.grants(), self.memory.budget())
        yield
        assert self.grants() <= self.memory.budget()
        assert [slot.grant_bytes for slot in self.slots] == [
            slot.engine.status().kv_bytes_grant for slot in self.slots
        ]

    def come(self, layers, context_tokens: int, weight_mib: int) -> None:
        description = describe(layers, context_tokens)
        name = f"m{next(self.numbers)}"
        engine = Watched(name, CODEC, lambda: None, EngineOptions(), self.memory.new_share(name))
        engine.on_resize = self.look
        slot = Slot(
            name=name,
            path=Path(name),
            description=description,
            codec=CODEC,
            defaults=SamplingParams(),
            engine=engine,
            weight_bytes=weight_mib * 2**20,
        )
        before = [each.grant_bytes for each in self.slots]
        self.slots.insert(0, slot)  # it grows first unless somebody sees to the order
        try:
            with self.settled():
                self.memory.share_out(check=True)
        except GrantTooSmall:
            self.slots.remove(slot)
            assert [each.grant_bytes for each in self.slots] == before

    def go(self, number: int) -> None:
        if self.slots:
            self.slots.pop(number % len(self.slots))
            with self.settled():
                self.memory.share_out(check=False)

    def warm(self, number: int, activation_mib: int) -> None:
        """Warm-up measured what activations take: the budget of all may shrink."""
        if self.slots:
            with self.settled():
                self.slots[number % len(self.slots)].activation_bytes = activation_mib * 2**20
                self.memory.share_out(check=False)


MODEL = st.tuples(LAYERS, st.sampled_from([0, 512, 4096, 131_072, 10**6]), st.integers(1, 12_000))
STEP = st.one_of(
    st.tuples(st.just("come"), MODEL),
    st.tuples(st.just("go"), st.tuples(st.integers(0, 5))),
    st.tuples(st.just("warm"), st.tuples(st.integers(0, 5), st.integers(0, 6000))),
)


@given(physical_gib=st.sampled_from([4, 8, 16, 24, 64, 128]), steps=st.lists(STEP, max_size=12))
def test_no_history_of_models_lets_grants_exceed_the_budget_at_any_moment(physical_gib, steps):
    shares = Shares(physical_gib)
    try:
        for step, arguments in steps:
            getattr(shares, step)(*arguments)
        while len(shares.slots) > 1:
            shares.go(0)
        if shares.slots:  # the last one has everything again, to the byte
            assert shares.slots[0].grant_bytes == shares.memory.budget()
    finally:
        shares.memory.close()
