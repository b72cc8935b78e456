"""Memory policy to the byte, and the ledger under contention."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.memory import Ledger, activation_reserve, effective_cap, hard_cap, kv_budget

GIB = 1024**3


@pytest.mark.parametrize(
    ("physical", "cap"),
    [
        (8, 6442450944),
        (16, 15032385536),
        (20, 19327352832),
        (24, 23192823398),
        (32, 30923764531),
        (36, 34789235097),
        (64, 61847529062),
        (128, 123695058124),
    ],
)
def test_the_hard_cap_is_right_to_the_byte(physical, cap):
    assert hard_cap(physical * GIB) == cap


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_caps_never_go_negative_and_leave_the_system_its_floor(physical, reserve):
    assert 0 <= effective_cap(physical, reserve) <= hard_cap(physical) <= max(0, physical - 2 * GIB)


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.integers(0, 2**45))
def test_the_kv_budget_saturates(cap, weights, activations):
    assert kv_budget(cap, weights, activations) == max(0, cap - weights - activations)
    assert 0 <= activation_reserve(cap) <= 3 * GIB


def test_concurrent_reservations_never_exceed_the_limit():
    ledger = Ledger(1000)
    taken = []

    def take(thread: int) -> None:
        for number in range(200):
            if ledger.reserve(f"{thread}/{number}", 7):
                taken.append(f"{thread}/{number}")
            assert ledger.reserved_bytes <= 1000

    threads = [threading.Thread(target=take, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1000 // 7
    for key in taken:
        ledger.release(key)
        ledger.release(key)
    assert ledger.reserved_bytes == 0
    assert ledger.reservations() == {}


def test_a_reserved_key_and_a_negative_size_are_faults():
    ledger = Ledger(10)
    assert ledger.reserve("a", 4)
    with pytest.raises(ValueError, match="reserved already"):
        ledger.reserve("a", 1)
    with pytest.raises(ValueError, match="cannot reserve -1"):
        ledger.reserve("b", -1)


def test_shrinking_leaves_reservations_and_refuses_new_ones():
    ledger = Ledger(10)
    assert ledger.reserve("a", 8)
    ledger.resize(5)
    assert ledger.reserved_bytes == 8
    assert not ledger.reserve("b", 1)
    ledger.release("a")
    assert ledger.reserve("b", 5)
