"""The book that all processes share: no 24 hours see more than the budget, whatever happens to clock, file or process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from darkbloom_ssd_tier._accounts import FILE, HOUR_SECONDS, Accounts, Book, Busy
from darkbloom_ssd_tier._admission import DayBudget, Sights
from hypothesis import given
from hypothesis import strategies as st

NOW = 1_800_000_000.0


@pytest.fixture
def handle(tmp_path):
    found = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield found
    os.close(found)


def charge(handle, now, size, budget, *, is_first=False) -> bool:
    """One write by a process that has just begun."""
    with Accounts(handle).open(now) as book:
        if not budget.allows(book.written(now), size, "first" if is_first else "again"):
            return False
        book.charge(now, size, is_first=is_first)
        return True


@given(
    st.lists(
        st.tuples(st.floats(0, 5 * HOUR_SECONDS), st.integers(1, 400), st.booleans()),
        min_size=1,
        max_size=120,
    )
)
def test_no_window_of_24_hours_sees_more_than_the_budget(writes):
    budget, now, book = DayBudget(1000, 300), NOW, Book()
    done = []
    for pause, size, is_first in writes:
        now += pause
        book = Book.unpacked(book.packed(now), now)
        if budget.allows(book.written(now), size, "first" if is_first else "again"):
            book.charge(now, size, is_first=is_first)
            done.append((now, size, is_first))
    for end, _, _ in done:
        window = [(size, is_first) for at, size, is_first in done if end - 24 * HOUR_SECONDS < at <= end]
        assert sum(size for size, _ in window) <= 1000
        assert sum(size for size, is_first in window if is_first) <= 300


def test_the_budget_is_whole_again_after_a_day(handle):
    budget = DayBudget(100, 100)
    assert charge(handle, NOW, 100, budget)
    assert not charge(handle, NOW + 23.9 * HOUR_SECONDS, 1, budget)
    assert charge(handle, NOW + 25 * HOUR_SECONDS, 100, budget)


def test_a_clock_that_was_wrong_gives_nothing_and_takes_nothing_for_ever(handle):
    budget = DayBudget(100, 100)
    assert charge(handle, NOW + 1000 * HOUR_SECONDS, 100, budget)
    assert not charge(handle, NOW, 1, budget)
    assert charge(handle, NOW + 25 * HOUR_SECONDS, 100, budget)


@pytest.mark.parametrize(
    "damage", [lambda file: file[:100], lambda file: file[:40] + b"\2" + file[41:], lambda file: b"x"]
)
def test_a_damaged_book_denies_a_day_of_writing(handle, tmp_path, damage):
    budget = DayBudget(100, 100)
    assert charge(handle, NOW, 1, budget)
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with Accounts(handle).open(NOW) as book:
        assert not book.is_counted
    assert not charge(handle, NOW, 1, budget)
    assert charge(handle, NOW + 25 * HOUR_SECONDS, 1, budget)


def test_what_is_on_disk_is_known_only_after_a_count_and_is_kept(handle):
    with Accounts(handle).open(NOW) as book:
        assert not book.is_counted
    with Accounts(handle).open(NOW) as book:
        assert not book.is_counted
        book.used_bytes, book.files, book.is_counted = 5000, 2, True
        book.read_milliseconds_per_byte = 0.5
    accounts = Accounts(handle)
    accounts.owe(4096)
    with accounts.open(NOW) as book:
        assert (book.used_bytes, book.files, book.is_counted) == (904, 1, True)
    assert accounts.peek(NOW).used_bytes == 904
    assert accounts.peek(NOW).read_milliseconds_per_byte == 0.5


def test_threads_take_turns(handle):
    accounts = Accounts(handle)

    def add():
        for _ in range(50):
            with accounts.open(NOW) as book:
                book.used_bytes, book.is_counted = book.used_bytes + 1, True

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert accounts.peek(NOW).used_bytes == 200


def test_a_process_that_holds_the_book_for_too_long_denies_writes(handle, tmp_path):
    code = (
        "import fcntl, sys\n"
        f"file = open({str(tmp_path / FILE)!r}, 'a+b')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Busy, match="another process"), Accounts(handle).open(NOW, 0.05):
            pass
        holder.stdin.close()
    with Accounts(handle).open(NOW):
        pass


def test_a_book_that_is_a_link_is_not_followed(handle, tmp_path):
    (tmp_path / "precious").write_bytes(b"data")
    (tmp_path / FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(Busy), Accounts(handle).open(NOW):
        pass
    assert (tmp_path / "precious").read_bytes() == b"data"


def test_sights_are_remembered_for_a_while_and_the_latest_only():
    sights = Sights(100, most=3)
    assert sights.see(b"a", 0) == "first"
    assert sights.sight(b"a", 100) == "again"
    assert sights.sight(b"a", 101) == "first"
    for name in (b"b", b"c", b"d"):
        sights.see(name, 1)
    assert len(sights) == 3
    assert sights.sight(b"a", 2) == "first"
