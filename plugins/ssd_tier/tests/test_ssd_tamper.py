"""Whatever is done to the folder: never a crash, never a wrong byte, and each damage is counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from darkbloom_core.errors import SetupError


@pytest.fixture
def tier(place):
    return place.open()


def damaged(tier) -> int:
    return tier.stats().damaged


def test_every_byte_of_a_file_flipped_is_a_miss_that_is_counted(place, ssd, tier):
    key, size = ssd.part(1), 40
    ssd.put(tier, [key], size)
    file = place.file_of(key)
    (entry,) = tier._store.index.all()
    sound = file.read_bytes()
    for at in range(len(sound)):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 0x80]) + sound[at + 1 :])
        tier._store.index.add(entry)
        assert ssd.get(tier, [key], size) == [False]
        assert damaged(tier) == at + 1
        assert not file.exists()
    file.write_bytes(sound)
    tier._store.index.add(entry)
    assert ssd.get(tier, [key], size) == [True]


def test_every_truncation_is_a_miss_that_is_counted(place, ssd, tier):
    key, size = ssd.part(1), 40
    ssd.put(tier, [key], size)
    file = place.file_of(key)
    (entry,) = tier._store.index.all()
    sound = file.read_bytes()
    for length in range(len(sound)):
        file.write_bytes(sound[:length])
        tier._store.index.add(entry)
        assert ssd.get(tier, [key], size) == [False]
        assert damaged(tier) == length + 1


def test_the_rest_is_used_and_a_damaged_part_is_written_again(place, ssd, tier):
    keys = [ssd.part(number) for number in range(5)]
    ssd.put(tier, keys)
    file = place.file_of(keys[2])
    file.write_bytes(bytes(file.stat().st_size))
    assert ssd.get(tier, keys) == [True, True, False, True, True]
    assert tier.probe(keys) == [5000, 5000, None, 5000, 5000]
    ssd.put(tier, keys)
    assert all(ssd.get(tier, keys))


def test_swapped_names_and_files_of_another_key_are_damaged(place, ssd, tier, tmp_path):
    one, two, three = (ssd.part(number) for number in range(3))
    ssd.put(tier, [one, two, three])
    foreign = ssd.Place(tmp_path / "foreign")
    strange = foreign.open()
    ssd.put(strange, [three])
    shutil.copy(foreign.file_of(three), place.file_of(three))
    first, second = place.file_of(one), place.file_of(two)
    both = first.read_bytes(), second.read_bytes()
    first.write_bytes(both[1])
    second.write_bytes(both[0])
    assert ssd.get(tier, [one, two, three]) == [False] * 3
    assert damaged(tier) == 3
    foreign.close()


def put_link(file: Path):
    target = file.with_name("target")
    file.rename(target)
    file.symlink_to(target)


def put_fifo(file: Path):
    file.unlink()
    os.mkfifo(file)


def put_directory(file: Path):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("do", [put_link, put_fifo, put_directory])
@pytest.mark.parametrize("when", ["while it runs", "before it starts"])
def test_what_is_no_file_is_removed_and_counted(place, ssd, do, when):
    keys = [ssd.part(1), ssd.part(2)]
    tier = place.open()
    ssd.put(tier, keys)
    file = place.file_of(keys[0])
    if when == "before it starts":
        place.restart()
    do(file)
    if when == "before it starts":
        tier = place.open()
    assert ssd.get(tier, keys) == [False, True]
    tier._store.recount(place.clock())
    assert not os.path.lexists(file)
    assert tier.stats().damaged + tier.stats().detail["removed_damaged"] >= 1
    ssd.put(tier, keys)
    assert all(ssd.get(tier, keys))


def test_a_directory_with_something_in_it_in_the_way_stays_and_costs_only_that_part(place, ssd, tier):
    file = place.file_of(ssd.part(1))
    (file / "precious").mkdir(parents=True)
    assert all(ssd.offer(tier, [ssd.part(1)]))
    assert tier.settle()
    assert tier.stats().detail["dropped_error"] == 1
    assert (file / "precious").is_dir()
    place.clock.ahead += 601
    ssd.put(tier, [ssd.part(2)])
    assert ssd.get(tier, [ssd.part(1), ssd.part(2)]) == [False, True]
    assert not place.files(".tmp-*")


def test_the_folder_that_is_taken_away_costs_misses(place, ssd, tier):
    ssd.put(tier, [ssd.part(1)])
    shutil.rmtree(place.folder)
    assert ssd.get(tier, [ssd.part(1)]) == [False]
    assert all(ssd.offer(tier, [ssd.part(2)]))
    assert tier.settle()
    assert tier.probe([ssd.part(1)]) == [None]
    tier._store.keep_house()


def test_what_an_interrupted_write_left_goes_at_the_next_start(place, ssd):
    ssd.put(place.open(), [ssd.part(1)])
    place.restart()
    left = place.files()[0].with_name(".tmp-" + "0f" * 16)
    left.write_bytes(bytes(100_000))
    place.open()
    tier = place.opened[-1]
    tier._store.recount(place.clock())
    assert not left.exists()
    assert tier.stats().detail["removed_left_behind"] == 1
    assert tier.stats().detail["disk_bytes_of_all_models"] == 8192


def test_files_that_are_not_ours_are_left_alone(place, ssd):
    ssd.put(place.open(), [ssd.part(1)])
    place.restart()
    folder = place.files()[0].parent
    notes = [folder / "notes.txt", folder / "AB.v1", place.folder / "readme", folder / (".tmp-" + "x" * 32)]
    for note in notes:
        note.write_text("mine")
    tier = place.open()
    place.clock.ahead += 30 * 24 * 3600
    tier._store.keep_house()
    assert place.files() == [folder / "AB.v1"]
    assert [note.read_text() for note in notes] == ["mine"] * 4


# --- the folder itself -------------------------------------------------------------------------


def test_folders_and_files_are_for_their_owner_alone(place, ssd):
    os.umask(old := os.umask(0))
    try:
        ssd.put(place.open(), [ssd.part(1)])
    finally:
        os.umask(old)
    for path in (place.folder, *place.folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_may_enter_is_closed_to_them(place, ssd):
    place.folder.mkdir(mode=0o755)
    place.folder.chmod(0o777)
    place.open()
    assert place.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_a_link_is_refused(place, tmp_path):
    (tmp_path / "real").mkdir()
    place.folder.symlink_to(tmp_path / "real")
    with pytest.raises(SetupError, match="cannot be a cache"):
        place.open()
    assert not list((tmp_path / "real").iterdir())


def test_a_models_folder_that_is_a_link_is_refused(place, ssd, tmp_path):
    place.open("other")
    (tmp_path / "real").mkdir()
    (place.folder / place.keys.folder_name("m")).symlink_to(tmp_path / "real")
    with pytest.raises(SetupError, match="cannot be used"):
        place.open("m")
    assert not list((tmp_path / "real").iterdir())


def test_a_folder_of_another_user_is_refused(place, monkeypatch):
    place.folder.mkdir()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(SetupError, match="belongs to another user"):
        place.open()


def test_a_folder_below_one_that_anybody_may_write_to_is_refused(place, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(SetupError, match="anybody may write to"):
        place.open()
    tmp_path.chmod(0o1777)
    place.open()


def test_a_folder_with_somebodys_data_is_refused(place):
    place.folder.mkdir()
    (place.folder / "photos").mkdir()
    with pytest.raises(SetupError, match="is not empty and no cache"):
        place.open()
    assert [path.name for path in place.folder.iterdir()] == ["photos"]


def test_a_file_in_the_place_of_the_folder_is_refused(place):
    place.folder.write_text("a file")
    with pytest.raises(SetupError):
        place.open()


def test_a_key_in_the_cache_itself_is_refused(place):
    with pytest.raises(SetupError, match="would lie in the cache's own folder"):
        place.open(key_file=str(place.folder / "ssd.key"))


def test_notes_that_cannot_be_read_are_an_error_that_says_what_to_do(place):
    place.open()
    place.restart()
    (place.folder / "about.json").write_text("{")
    with pytest.raises(SetupError, match="wipe"):
        place.open()


# --- file systems ------------------------------------------------------------------------------

SCRIPT = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import Place, get, offer, part, put
base = Path({base!r})
base.joinpath("disk").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", base / "disk"], check=True)
place = Place(base)
place.folder = base / "disk" / "cache"
plenty = {{"write_bytes_per_day": 10**9}}
"""


def in_a_namespace(tmp_path, script: str) -> str:
    """Run a script that may mount file systems, which nobody else sees."""
    whole = SCRIPT.format(tests=str(Path(__file__).parent), base=str(tmp_path)) + script
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-W", "error", "-c", whole],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
def test_a_full_disk_stops_writing_for_a_while_and_reading_goes_on(tmp_path):
    said = in_a_namespace(
        tmp_path,
        """
tier = place.open(**plenty)
keys = [part(number) for number in range(12)]
object.__setattr__(tier._store.retention.limits, "free_bytes_floor", -10**9)  # somebody else was faster
offer(tier, keys, 30_000)
assert tier.settle()
there = [size is not None for size in tier.probe(keys)]
assert 2 < sum(there) < 12, there
dropped = tier.stats().detail
assert dropped["dropped_error"] == 1, dropped
assert dropped["dropped_error"] + dropped["dropped_pause"] == 12 - sum(there)
assert get(tier, keys, 30_000) == there
assert not place.files(".tmp-*")
place.clock.ahead += 601
tier.forget(keys[:2])
assert tier.settle()
while len(place.files()) > sum(there) - 2: pass
put(tier, [part(99)], 30_000)
place.close()
print("done")
""",
    )
    assert said == "done\n"


@pytest.mark.system
def test_a_read_only_disk_is_read_and_nothing_else(tmp_path):
    said = in_a_namespace(
        tmp_path,
        """
keys = [part(number) for number in range(3)]
put(place.open(**plenty), keys)
def remount(how):
    subprocess.run(["mount", "-o", "remount," + how, base / "disk"], check=True)
place.restart()
remount("ro")
tier = place.open(**plenty)
assert get(tier, keys) == [True] * 3
assert offer(tier, [part(9)]) == [False]
tier._store.keep_house()
place.clock.ahead += 30 * 24 * 3600
tier._store.keep_house()
assert get(tier, keys) == [True] * 3
place.restart()
place.clock.ahead = 0
remount("rw")
tier = place.open(**plenty)
remount("ro")
assert offer(tier, [part(9)]) == [True]
assert tier.settle()
assert tier.stats().detail["dropped_error"] == 1
assert get(tier, keys) == [True] * 3
place.close()
print("done")
""",
    )
    assert said == "done\n"
