"""What holds at the edges: entries of another owner, links put in a file's place, faults of a thread, handles that close."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from darkbloom_ssd_tier._accounts import FILE, Accounts
from darkbloom_ssd_tier._folder import Folder, NewFile, reading, remove, scan, touch
from darkbloom_ssd_tier._format import Damaged
from darkbloom_ssd_tier._home import Home
from darkbloom_ssd_tier._index import Entry, Index
from darkbloom_ssd_tier._stores import FileStore

from darkbloom_core.errors import SetupError

PART = "ab" * 32 + ".v1"


@pytest.fixture
def handle(tmp_path):
    (tmp_path / "model").mkdir()
    found = os.open(tmp_path / "model", os.O_RDONLY | os.O_DIRECTORY)
    yield found
    os.close(found)


@pytest.fixture
def as_another_user(monkeypatch):
    """From when it is called, what exists belongs to somebody else."""
    user = os.geteuid()
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def soon(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


# --- owners and links ---------------------------------------------------------------------------


def test_a_folder_below_another_users_is_refused(place, monkeypatch):
    above, real = place.base.resolve(), Path.stat

    def stat(self, **how):
        found = real(self, **how)
        if self != above:
            return found
        return os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(SetupError, match="above the cache, belongs to another user"):
        Folder.open(place.folder)


def test_a_part_of_another_user_is_no_part(place, ssd, as_another_user, monkeypatch):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)])
    with tier._home.used() as handle:
        as_another_user()
        assert [found.kind for found in scan(handle)] == ["wrong"]
    assert ssd.get(tier, [ssd.part(1)]) == [False]
    assert tier.stats().damaged == 1


def test_a_key_file_of_another_user_is_refused(tmp_path, as_another_user):
    store = FileStore(tmp_path / "ssd.key")
    store.create()
    as_another_user()
    with pytest.raises(SetupError, match="not a file of this user"):
        store.load()


def test_a_destroyed_key_is_overwritten_also_for_who_has_it_open(tmp_path):
    store = FileStore(tmp_path / "ssd.key")
    store.create()
    with store.path.open("rb") as file:
        store.destroy()
        assert not file.read().strip(b"\0")


def test_only_names_of_ours_can_be_removed(handle, tmp_path):
    (tmp_path / "model" / "precious").touch()
    for name in ("precious", "../model/precious", PART + "x"):
        with pytest.raises(ValueError, match="not a name of ours"):
            remove(handle, name)
    assert (tmp_path / "model" / "precious").exists()


def test_noting_a_use_does_not_reach_through_a_link(handle, tmp_path):
    precious = tmp_path / "precious"
    precious.touch()
    os.utime(precious, (5, 5))
    (tmp_path / "model" / PART).symlink_to(precious)
    touch(handle, PART, 1000.0)
    assert precious.stat().st_mtime == 5


def test_a_lock_that_is_a_link_is_not_taken(tmp_path):
    precious = tmp_path / "precious"
    (tmp_path / "lock").symlink_to(precious)
    home = Home("m", os.open(tmp_path, os.O_RDONLY))
    assert not home.own()
    assert not precious.exists()
    home.close()


def test_a_book_that_is_a_link_is_not_looked_into(handle, tmp_path):
    accounts = Accounts(handle)
    now = 1e9
    with accounts.open(now) as book:
        book.charge(now, 1000, is_first=False)
    assert accounts.peek(now).written(now).written_bytes == 1000
    file = tmp_path / "model" / FILE
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert accounts.peek(now).written(now).written_bytes == 0


if sys.platform == "linux":

    def test_what_the_disk_cannot_read_is_damaged():
        """Reading address 0 of a process is such an error."""
        folder = os.open("/proc/self", os.O_RDONLY)
        try:
            with reading(folder, "mem") as (read, _), pytest.raises(Damaged, match="the disk cannot read it"):
                read(memoryview(bytearray(8)))
        finally:
            os.close(folder)


def no_more_files(*_):
    raise OSError(24, "too many open files")


# --- files while they are written ---------------------------------------------------------------


def test_a_file_has_its_whole_length_before_its_first_byte(handle):
    file = NewFile(handle, 100_000)
    (found,) = scan(handle)
    assert (found.kind, found.size_bytes) == ("temporary", 100_000)
    file.abandon()
    assert not list(scan(handle))


def test_anothers_write_that_was_interrupted_goes_after_an_hour_and_not_before(place, ssd):
    other = place.other_process().open("other")
    ssd.put(other, [ssd.part(1)])
    tier = place.open("mine")
    left = place.files()[0].with_name(".tmp-" + "0" * 32)
    left.write_bytes(b"x")
    tier._store.recount(place.clock())
    assert left.exists()
    place.clock.ahead += 3601
    tier._store.recount(place.clock())
    assert not left.exists()


def test_a_folder_that_cannot_be_read_for_once_stays_known_and_counted(place, ssd, monkeypatch, caplog):
    ssd.put(place.open("other"), [ssd.part(1)])
    tier = place.open()
    keys = [ssd.part(2), ssd.part(3)]
    ssd.put(tier, keys)
    with monkeypatch.context() as patch:
        patch.setattr("darkbloom_ssd_tier._retention.scan", no_more_files)
        tier._store.recount(place.clock())
    assert "is left alone: [Errno 24]" in caplog.text
    assert tier.probe(keys) == [5000, 5000]
    detail = tier.stats().detail
    assert (detail["files_of_all_models"], detail["disk_bytes_of_all_models"]) == (3, 3 * 8192)
    with tier._store.accounts.open(place.clock()) as book:
        assert (book.files, book.used_bytes) == (3, 3 * 8192)
    place.file_of(keys[0]).unlink()
    tier._store.keep_house()  # long before the next scan by the clock
    assert tier.probe(keys) == [None, 5000]


def test_a_count_that_cannot_be_made_is_not_believed_and_made_again(place, ssd, monkeypatch):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)])
    with monkeypatch.context() as patch:
        patch.setattr(tier._store.folder, "models", no_more_files)
        with pytest.raises(OSError, match="too many open files"):
            tier._store.recount(place.clock())
    with tier._store.accounts.open(place.clock()) as book:
        assert (book.files, book.used_bytes) == (1, 8192)
    file = place.file_of(ssd.part(1))
    file.unlink()
    tier._store.keep_house()  # long before the next scan by the clock
    assert tier.probe([ssd.part(1)]) == [None]


def test_a_folder_in_use_stays_open_and_one_that_was_closed_is_said_to_be(tmp_path):
    home = Home("m", os.open(tmp_path, os.O_RDONLY))
    with home.used() as handle:
        home.close()
        os.fstat(handle)
    with pytest.raises(OSError, match="closed"), home.used():
        pass


# --- the index ----------------------------------------------------------------------------------


def entry(name: str, used_at: float) -> Entry:
    return Entry("folder", name, 1, 4096, used_at, used_at)


def test_a_use_that_is_told_late_makes_nothing_older():
    index, one = Index(), entry("one", 100.0)
    index.add(one)
    index.add(entry("two", 50.0))
    index.use([one], 10.0)
    assert one.used_at == 100.0
    assert index.oldest().file == "two"


def test_many_uses_of_a_few_parts_take_no_memory():
    index, one = Index(), entry("one", 0.0)
    index.add(one)
    for now in range(1, 5000):
        index.use([one], float(now))
    assert len(index._heap) < 2000
    assert index.oldest() is one


# --- threads and queues ---------------------------------------------------------------------------


def test_the_writer_and_the_keeper_outlive_a_fault(place, ssd, monkeypatch, caplog):
    tier = place.open()
    store, faults = tier._store, []

    def broken(*_):
        faults.append(threading.current_thread().name)
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(store.retention, "tell", broken)
        patch.setattr(store.writer, "_write", broken)
        place.open("another", wait=False)
        assert ssd.offer(tier, [ssd.part(1)]) == [True]
        assert store.writer.settle(20)
        soon(lambda: set(faults) == {"ssd tier keeper", "ssd tier writer"})
    assert tier.stats().detail["dropped_error"] == 1
    soon(lambda: caplog.text.count("RuntimeError: a fault of ours") == len(faults))
    ssd.put(tier, [ssd.part(1)])
    store.is_scanned.clear()
    place.open("a third", wait=False)
    soon(store.is_scanned.is_set)


def test_what_waits_when_the_disk_fails_is_not_tried(place, ssd):
    tier = place.open()
    with tier._store._writing:
        assert all(ssd.offer(tier, [ssd.part(number) for number in range(3)]))
        soon(lambda: len(tier._store.writer._queue) == 2)  # the first is at the door
        tier._store._paused_until = place.clock() + 600
    assert tier.settle()
    assert tier.stats().detail["dropped_pause"] == 2
    assert len(place.files()) == 1


def test_a_part_that_is_offered_twice_waits_once(place, ssd):
    tier = place.open()
    with tier._store._writing:
        assert ssd.offer(tier, [ssd.part(1)] * 2) == [True, True]
        assert place.reserved == {"m": 5000}
    assert tier.settle()
    assert place.reserved == {"m": 0}


def test_a_part_that_is_forgotten_while_it_waits_is_not_written(place, ssd):
    tier = place.open()
    keys = [ssd.part(1), ssd.part(2)]
    with tier._store._writing:
        assert all(ssd.offer(tier, keys))
        soon(lambda: len(tier._store.writer._queue) == 1)
        tier.forget(keys[1:])
        assert tier.probe(keys) == [5000, None]
        assert place.reserved == {"m": 5000}
    assert tier.settle()
    assert len(place.files()) == 1


def test_who_only_reads_forgets_nothing_of_the_one_who_writes(place, ssd):
    first = place.open()
    ssd.put(first, [ssd.part(1)])
    second = place.other_process().open()
    second.forget([ssd.part(1)])
    second._store.readers.close()
    assert place.file_of(ssd.part(1)).exists()
    assert ssd.get(first, [ssd.part(1)]) == [True]


def test_nothing_is_written_while_it_is_not_known_what_is_on_disk(place, ssd):
    tier = place.open()
    (place.folder / FILE).write_bytes(b"")
    assert ssd.offer(tier, [ssd.part(1)]) == [True]
    assert tier.settle()
    assert tier.stats().detail["dropped_closed"] == 1
    tier._store.recount(place.clock())
    ssd.put(tier, [ssd.part(1)])
