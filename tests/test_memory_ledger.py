"""The ledger under contention."""

from __future__ import annotations

import threading

import pytest

from darkbloom_core.memory import Ledger


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
