"""The tier against its contract, with real files: it keeps, gives back, stays within bounds, and only ever misses."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from darkbloom_ssd_tier import _writer
from darkbloom_ssd_tier._format import file_bytes
from darkbloom_ssd_tier._options import SsdOptions

from darkbloom_core.contracts import Fetch, PartsFetched, PartsWritten
from darkbloom_core.errors import SettingsError, SetupError
from darkbloom_core.plugins import PluginOptions, load_plugins


def test_the_plugin_offers_its_tier_and_its_commands():
    plugins = load_plugins(PluginOptions(allow=frozenset({"ssd-tier"}), strict=True))
    (report,) = [report for report in plugins.report() if report.name == "ssd-tier"]
    assert report.state == "loaded"
    assert set(report.hooks) == {"cache_tiers", "cli_commands"}
    assert [tier.name for tier in plugins.cache_tiers()] == ["ssd-tier"]


def test_what_is_offered_is_given_back_and_outlives_the_process(place, ssd):
    keys = [ssd.part(number) for number in range(20)]
    tier = place.open()
    ssd.put(tier, keys)
    assert tier.probe([*keys, ssd.part(99)]) == [5000] * 20 + [None]
    assert all(ssd.get(tier, keys))
    place.restart()
    tier = place.open()
    assert tier.probe(keys) == [5000] * 20
    assert all(ssd.get(tier, keys))
    assert (tier.stats().hits, tier.stats().misses, tier.stats().parts) == (20, 0, 20)


def test_parts_of_a_block_and_models_are_kept_apart(place, ssd):
    one, other = ssd.part(1, "full"), ssd.part(1, "window")
    tier = place.open("one")
    ssd.put(tier, [one])
    assert tier.probe([one, other]) == [5000, None]
    assert place.open("two").probe([one]) == [None]


def test_before_the_folder_is_scanned_everything_misses(place, ssd):
    keys = [ssd.part(1)]
    ssd.put(place.open(), keys)
    place.restart()
    tier = place.open()
    with tier._store._writing:  # no scan ends
        tier._store.is_scanned.clear()
        assert tier.probe(keys) == [None]
        assert not tier.offer(ssd.part(2), memoryview(b"data"))
    tier._store.recount(place.clock())
    assert tier.probe(keys) == [5000]


def test_parts_that_wait_to_be_written_are_there_already(place, ssd):
    tier = place.open()
    key = ssd.part(1)
    with tier._store._writing:
        assert all(ssd.offer(tier, [key]))
        assert tier.probe([key]) == [5000]
        assert ssd.get(tier, [key]) == [True]
        assert place.reserved == {"m": 5000}
        assert not place.files()
    assert tier.settle()
    assert len(place.files()) == 1
    assert place.reserved == {"m": 0}


def test_an_offer_copies_and_never_waits_for_the_disk(place, ssd):
    tier = place.open(queue_bytes=12_000)
    keys = [ssd.part(number) for number in range(4)]
    with tier._store._writing:
        began = time.monotonic()
        buffer = bytearray(ssd.content(keys[0]))
        assert tier.offer(keys[0], memoryview(buffer))
        buffer[:] = bytes(5000)
        assert ssd.offer(tier, keys[1:]) == [True, False, False]
        assert time.monotonic() - began < 1
    assert tier.settle()
    assert tier.stats().detail["dropped_pressure"] == 2
    assert ssd.get(tier, keys) == [True, True, False, False]


def test_what_waits_is_reserved_first_and_dropped_if_memory_is_short(place, ssd):
    tier = place.open()
    place.memory = 7000
    with tier._store._writing:
        assert ssd.offer(tier, [ssd.part(1), ssd.part(2)]) == [True, False]
        assert place.reserved == {"m": 5000}
    assert tier.settle()
    assert tier.stats().detail["dropped_memory"] == 1
    assert place.reserved == {"m": 0}


def test_closing_writes_what_waits(place, ssd):
    tier = place.open(write_bytes_per_second=1000)
    keys = [ssd.part(number) for number in range(5)]
    assert all(ssd.offer(tier, keys))
    began = time.monotonic()
    place.restart()
    assert time.monotonic() - began < 3
    assert place.reserved == {"m": 0}
    assert place.open().probe(keys) == [5000] * 5


def test_closing_does_not_wait_for_a_disk_that_hangs(place, ssd, monkeypatch):
    monkeypatch.setattr(_writer, "FLUSH_SECONDS", 0.2)
    tier = place.open()
    keys = [ssd.part(number) for number in range(3)]
    with tier._store._writing:
        ssd.offer(tier, keys)
        closing = threading.Thread(target=tier._store.writer.leave, args=(tier._account,))
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
    assert tier.stats().detail["dropped_closed"] >= 2


def test_after_closing_everything_misses_and_closing_again_is_nothing(place, ssd):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)])
    tier.close()
    tier.close()
    assert tier.probe([ssd.part(1)]) == [None]
    assert not tier.offer(ssd.part(2), memoryview(b"x"))
    assert tier.used([ssd.part(2)]) == [False]
    assert tier.fetch([Fetch(ssd.part(1), memoryview(bytearray(5000)))]).result(5) == (False,)


def test_writing_keeps_to_its_rate(place, ssd):
    tier = place.open(write_bytes_per_second=50_000)
    began = time.monotonic()
    ssd.put(tier, [ssd.part(number) for number in range(4)])
    assert time.monotonic() - began >= 0.25


# --- what is worth writing --------------------------------------------------------------------


def test_a_prompt_is_written_when_it_comes_back(place, ssd):
    tier = place.open(first_sight_share=0.0)
    keys = [ssd.part(number) for number in range(3)]
    assert ssd.offer(tier, keys) == [False] * 3
    assert tier.used(keys) == [False] * 3
    assert tier.stats().detail["dropped_budget"] == 3
    assert ssd.offer(tier, keys) == [True] * 3
    assert tier.settle()
    assert tier.probe(keys) == [5000] * 3


def test_a_prompt_that_ram_serves_again_is_asked_for(place, ssd):
    tier = place.open(first_sight_share=0.0)
    keys = [ssd.part(number) for number in range(3)]
    assert tier.used(keys) == [False] * 3
    assert tier.used(keys) == [True] * 3
    ssd.put(tier, keys[:1])
    assert tier.used(keys) == [False, True, True]


def test_a_prompt_that_comes_back_too_late_is_new(place, ssd):
    tier = place.open(first_sight_share=0.0, second_sight_seconds=100)
    tier.used([ssd.part(1)])
    place.clock.ahead += 101
    assert tier.used([ssd.part(1)]) == [False]
    assert ssd.offer(tier, [ssd.part(1)]) == [True]


def test_first_sights_have_a_share_of_the_days_bytes_and_the_rest_is_for_those_that_come_back(place, ssd):
    size = file_bytes(5000)
    tier = place.open(write_bytes_per_day=10 * size, first_sight_share=0.4)
    keys = [ssd.part(number) for number in range(20)]
    tier.used(keys[10:])
    assert sum(ssd.offer(tier, keys[:10])) == 4
    assert tier.settle()
    assert sum(ssd.offer(tier, keys[10:])) == 6
    assert tier.settle()
    assert len(place.files()) == 10


def test_the_days_bytes_survive_a_restart_and_come_back_after_a_day(place, ssd):
    size = file_bytes(5000)
    options = {"write_bytes_per_day": 3 * size}
    ssd.put(place.open(**options), [ssd.part(number) for number in range(3)])
    place.restart()
    tier = place.open(**options)
    assert ssd.offer(tier, [ssd.part(9)]) == [False]
    assert ssd.get(tier, [ssd.part(1)]) == [True]
    place.clock.ahead += 25 * 3600
    place.restart()
    assert ssd.offer(place.open(**options), [ssd.part(9)]) == [True]


def test_what_is_there_already_is_not_written_again(place, ssd):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)])
    (file,) = place.files()
    before = file.stat().st_ino
    ssd.put(tier, [ssd.part(1)])
    assert file.stat().st_ino == before
    assert tier.stats().detail["files_of_all_models"] == 1


# --- limits -----------------------------------------------------------------------------------


def test_the_limit_holds_and_what_was_used_longest_ago_goes(place, ssd):
    tier = place.open(bytes_limit=4 * 8192)
    keys = [ssd.part(number) for number in range(4)]
    ssd.put(tier, keys)
    place.clock.ahead += 10
    assert all(ssd.get(tier, keys[:2]))
    place.clock.ahead += 10
    ssd.put(tier, [ssd.part(4), ssd.part(5)])
    assert tier.probe([*keys, ssd.part(4), ssd.part(5)]) == [5000, 5000, None, None, 5000, 5000]
    assert (tier.stats().evicted, len(place.files())) == (2, 4)


def test_of_a_prompt_its_end_goes_first_also_after_a_restart(place, ssd):
    limit = {"bytes_limit": 6 * 8192}
    tier = place.open(**limit)
    keys = [ssd.part(number) for number in range(6)]
    ssd.put(tier, keys)
    place.clock.ahead += 1000
    tier.used(keys)
    place.restart()
    tier = place.open(**limit)
    place.clock.ahead += 1000
    ssd.put(tier, [ssd.part(10), ssd.part(11)])
    assert tier.probe(keys) == [5000] * 4 + [None] * 2


def test_uses_that_ram_serves_keep_parts_from_growing_old(place, ssd):
    tier = place.open(ttl_seconds=1000)
    keys = [ssd.part(1), ssd.part(2)]
    ssd.put(tier, keys)
    for _ in range(3):
        place.clock.ahead += 900
        tier.used(keys[:1])
        tier._store.keep_house()
    assert tier.probe(keys) == [5000, None]
    assert tier.stats().detail["removed_age"] == 1
    place.restart()
    assert place.open(ttl_seconds=1000).probe(keys) == [5000, None]


def test_files_of_other_models_and_formats_count_and_go_when_they_are_old(place, ssd, caplog):
    caplog.set_level("INFO")
    ssd.put(place.open("old"), [ssd.part(number) for number in range(3)])
    place.restart()
    other_format = place.files()[0].with_name("ab" * 32 + ".v7")
    other_format.write_bytes(bytes(9000))
    tier = place.open("new", bytes_limit=6 * 8192)
    assert tier.stats().detail["files_of_all_models"] == 4
    place.clock.ahead += 10
    ssd.put(tier, [ssd.part(number) for number in range(5)])
    assert len(place.files()) + other_format.exists() == 5 + (other_format.exists())
    place.clock.ahead += 8 * 24 * 3600
    tier._store.keep_house()
    assert not place.files("*.v*")
    assert "not used for too long" in caplog.text
    assert "used longest ago, and the cache is full" in caplog.text


def test_the_number_of_files_is_limited(place, ssd):
    tier = place.open(files_limit=3)
    ssd.put(tier, [ssd.part(number) for number in range(5)])
    assert len(place.files()) == 3
    tier._store.keep_house()
    assert len(place.files()) == 3, "a full cache stays full"


def test_a_part_that_can_never_fit_is_refused_and_drives_nothing_out(place, ssd):
    tier = place.open(bytes_limit=3 * 8192)
    ssd.put(tier, [ssd.part(1)])
    assert not tier.offer(ssd.part(2), memoryview(bytes(30_000)))
    assert tier.stats().detail["dropped_room"] == 1
    assert tier.probe([ssd.part(1)]) == [5000]


def test_the_disks_free_space_is_left_alone_and_given_back(place, ssd):
    tier = place.open()
    keys = [ssd.part(1), ssd.part(2)]
    ssd.put(tier, keys)
    store = tier._store
    free, _ = store.folder.free_bytes()
    object.__setattr__(store.retention.limits, "free_bytes_floor", free + 10**9)
    assert all(ssd.offer(tier, [ssd.part(3)]))
    assert tier.settle()
    assert tier.stats().detail["dropped_space"] == 1
    store.keep_house()
    assert not place.files()
    assert tier.stats().detail["removed_space"] == 2


def test_defaults_are_sized_to_the_disk(place):
    tier = place.open(
        bytes_limit=None, free_bytes_floor=None, write_bytes_per_day=None, first_sight_share=0.25
    )
    found = os.statvfs(place.folder)
    size = found.f_blocks * found.f_frsize
    store = tier._store
    assert store.retention.limits.disk_bytes == size // 10
    assert store.retention.limits.free_bytes_floor == min(20 * 1024**3, size // 10)
    assert store.budget.bytes_per_day == size // 10
    assert store.budget.first_bytes_per_day == size // 10 // 4


# --- reading ------------------------------------------------------------------------------------


def test_a_part_that_went_meanwhile_misses_and_the_rest_comes(place, ssd):
    tier = place.open()
    keys = [ssd.part(number) for number in range(3)]
    ssd.put(tier, keys)
    place.file_of(keys[1]).unlink()
    assert ssd.get(tier, keys) == [True, False, True]
    assert tier.stats().damaged == 0
    assert tier.probe(keys) == [5000, None, 5000]


def test_a_buffer_of_another_length_misses_and_harms_nothing(place, ssd):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)])
    assert tier.fetch([Fetch(ssd.part(1), memoryview(bytearray(4999)))]).result(5) == (False,)
    assert ssd.get(tier, [ssd.part(1)]) == [True]
    assert tier.stats().damaged == 0


def test_an_answer_that_nobody_wants_ends_and_is_done_only_when_nothing_writes_to_its_buffers(place, ssd):
    tier = place.open(readers=1)
    size = 8 * 1024**2
    keys = [ssd.part(number) for number in range(2)]
    ssd.put(tier, keys, size)
    held = threading.Lock()
    held.acquire()
    tier._store.readers.submit(lambda: held.acquire() and None)
    waiting = tier.fetch([Fetch(key, memoryview(bytearray(size))) for key in keys])
    assert waiting.cancel()
    assert waiting.done()
    held.release()
    running = tier.fetch([Fetch(key, memoryview(bytearray(size))) for key in keys])
    while not running.running() and not running.done():
        time.sleep(0.0005)
    running.cancel()
    assert running.cancelled() or len(running.result(5)) == 2
    assert all(ssd.get(tier, keys, size))


def test_nothing_to_fetch_is_answered_with_nothing(place):
    assert place.open().fetch([]).result(1) == ()


def test_too_many_open_files_cost_a_miss_and_no_file(place, ssd, monkeypatch):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)])
    with monkeypatch.context() as patch:

        def no_more(*_, **__):
            raise OSError(24, "too many open files")

        patch.setattr("darkbloom_ssd_tier._folder.os.open", no_more)
        assert ssd.get(tier, [ssd.part(1)]) == [False]
    assert ssd.get(tier, [ssd.part(1)]) == [True]
    assert tier.stats().detail["read_errors"] == 1


def test_forgotten_parts_are_gone_from_disk(place, ssd):
    tier = place.open()
    keys = [ssd.part(1), ssd.part(2)]
    ssd.put(tier, keys)
    tier.forget(keys[:1])
    assert tier.probe(keys) == [None, 5000]
    assert ssd.get(tier, keys) == [False, True]
    tier._store.readers.close()
    assert len(place.files()) == 1


def test_the_measured_speed_is_known_after_a_restart(place, ssd):
    tier = place.open()
    ssd.put(tier, [ssd.part(1)], 1 << 20)
    assert tier.stats().read_milliseconds_per_byte is None
    ssd.get(tier, [ssd.part(1)], 1 << 20)
    measured = tier.stats().read_milliseconds_per_byte
    assert 0 < measured < 1e-3
    place.restart()
    assert place.open().stats().read_milliseconds_per_byte == pytest.approx(measured)


def test_reading_and_writing_are_told_as_events(place, ssd):
    tier = place.open()
    ssd.put(tier, [ssd.part(1), ssd.part(2)])
    ssd.get(tier, [ssd.part(1), ssd.part(3)])
    (fetched,) = place.events.of(PartsFetched)
    assert (fetched.model, fetched.tier) == ("m", "ssd-tier")
    assert (fetched.parts, fetched.parts_missing, fetched.size_bytes) == (2, 1, 5000)
    assert fetched.duration_seconds > 0
    written = place.events.of(PartsWritten)
    assert sum(event.parts for event in written) == 2
    assert sum(event.size_bytes for event in written) == 10_000
    assert all(event.duration_seconds > 0 for event in written)


# --- several processes --------------------------------------------------------------------------


def test_of_two_processes_one_writes_and_the_other_reads_and_takes_over(place, ssd, caplog):
    first = place.open()
    ssd.put(first, [ssd.part(1)])
    other = place.other_process()
    second = other.open()
    assert "this one only reads" in caplog.text
    assert ssd.get(second, [ssd.part(1)]) == [True]
    assert ssd.offer(second, [ssd.part(2)]) == [False]
    ssd.put(first, [ssd.part(3)])
    second._store.recount(place.clock())
    assert second.probe([ssd.part(3)]) == [5000]
    first.close()
    second._store.keep_house()
    ssd.put(second, [ssd.part(2)])
    assert len(place.files()) == 3


def test_one_who_only_reads_removes_nothing(place, ssd):
    first = place.open()
    ssd.put(first, [ssd.part(1)])
    second = place.other_process().open()
    file = place.file_of(ssd.part(1))
    *rest, last = file.read_bytes()
    file.write_bytes(bytes([*rest, last ^ 1]))
    assert ssd.get(second, [ssd.part(1)]) == [False]
    assert second.probe([ssd.part(1)]) == [None]
    assert file.exists()
    assert ssd.get(first, [ssd.part(1)]) == [False]
    assert not file.exists()


def test_processes_of_two_models_share_limit_and_budget(place, ssd):
    size = file_bytes(5000)
    options = {"bytes_limit": 6 * 8192, "write_bytes_per_day": 9 * size}
    one = place.open("one", **options)
    two = place.other_process().open("two", **options)
    ssd.put(one, [ssd.part(number) for number in range(4)])
    two._store.recount(place.clock())
    place.clock.ahead += 1
    ssd.put(two, [ssd.part(number) for number in range(4)])
    assert len(place.files()) == 6
    ssd.offer(one, [ssd.part(8), ssd.part(9)])
    assert one.settle()
    assert one.stats().detail["dropped_budget"] == 1


def test_what_another_process_used_just_now_does_not_go(place, ssd):
    limit = {"bytes_limit": 3 * 8192}
    one = place.open("one", **limit)
    ssd.put(one, [ssd.part(1), ssd.part(2)])
    two = place.other_process().open("two", **limit)
    place.clock.ahead += 1000
    one.used([ssd.part(1)])
    one._store.keep_house()
    place.clock.ahead += 10
    ssd.put(two, [ssd.part(3), ssd.part(4)])
    assert place.file_of(ssd.part(1), "one").exists()
    assert not place.file_of(ssd.part(2), "one").exists()


def test_a_model_that_is_opened_twice_in_a_process_writes_from_both(place, ssd):
    one, two = place.open(), place.open()
    ssd.put(one, [ssd.part(1)])
    one.close()
    ssd.put(two, [ssd.part(2)])
    assert ssd.get(two, [ssd.part(1), ssd.part(2)]) == [True, True]


# --- opening ------------------------------------------------------------------------------------


def test_options_are_checked_and_texts_from_the_environment_are_understood(place):
    with pytest.raises(SettingsError, match=r"options.ssd-tier.byte_limit: did you mean bytes_limit"):
        place.open(byte_limit=3)
    with pytest.raises(SettingsError, match=r"options.ssd-tier.readers: "):
        place.open(readers=0)
    assert place.open(readers="2", fsync="true")._store.options.readers == 2


def test_without_a_key_there_is_no_tier(place, monkeypatch):
    with pytest.raises(SetupError, match="SSD_TIER_KEY"):
        place.open(key_store="environment")
    assert not place.files("*")
    monkeypatch.setenv("SSD_TIER_KEY", "ab" * 32)
    place.open(key_store="environment")


def test_with_another_key_nothing_is_found_and_that_is_said(place, ssd, caplog):
    ssd.put(place.open(), [ssd.part(1)])
    place.restart()
    place.key_file.unlink()
    tier = place.open()
    assert "the key of" in caplog.text
    assert tier.probe([ssd.part(1)]) == [None]
    assert tier.stats().detail["files_of_all_models"] == 1


def test_files_are_synced_if_that_is_wanted(place, ssd, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file)))
    tier = place.open(fsync=True)
    before = len(synced)
    ssd.put(tier, [ssd.part(1)])
    assert len(synced) == before + 2


def test_every_option_is_on_the_page_with_its_meaning():
    page = (Path(__file__).resolve().parents[3] / "docs" / "ssd.md").read_text(encoding="utf-8")
    for name, field in SsdOptions.model_fields.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert any(row.endswith(f"| {field.description} |") for row in rows), name
