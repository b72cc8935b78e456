"""A checkpoint's digest is computed once for each version of its files, also across processes."""

from __future__ import annotations

import json
import os

import pytest

from darkbloom_core.slots import Digests


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(name.encode() * 100)
    return folder


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "digests.json"


def test_each_file_is_read_once_for_each_version(checkpoint):
    digests = Digests()
    first = digests.of(checkpoint)
    assert digests.of(checkpoint) == digests.begin(checkpoint).result(10) == first
    assert digests.computed == 3
    (checkpoint / "b.safetensors").write_bytes(b"c" * 100)
    assert digests.of(checkpoint) != first
    assert digests.computed == 4


@pytest.mark.parametrize("name", ["config.json", "a.safetensors"])
def test_weights_and_config_both_count(checkpoint, name):
    first = Digests().of(checkpoint)
    (checkpoint / name).write_bytes(b"{} ")
    assert Digests().of(checkpoint) != first


def test_a_file_of_another_name_is_another_checkpoint(checkpoint):
    first = Digests().of(checkpoint)
    (checkpoint / "b.safetensors").rename(checkpoint / "c.safetensors")
    assert Digests().of(checkpoint) != first


def test_another_process_reads_nothing_again(checkpoint, file):
    first = Digests(file).of(checkpoint)
    later = Digests(file)
    assert later.of(checkpoint) == first
    assert later.computed == 0


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_any_sign_of_change_counts_also_for_another_process(checkpoint, file, change):
    Digests(file).of(checkpoint)
    weights = checkpoint / "a.safetensors"
    stat = weights.stat()
    if change == "size":
        weights.write_bytes(b"longer than before" * 100)
    elif change == "time":
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        copy = checkpoint / "copy"
        copy.write_bytes(b"a" * 100)
        os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        copy.replace(weights)
    later = Digests(file)
    later.of(checkpoint)
    assert later.computed == 1


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"a": 1}', '{"a": ["x", 1, 2, "d"]}'])
def test_a_damaged_memory_counts_as_empty(checkpoint, file, text):
    first = Digests(file).of(checkpoint)
    file.write_text(text)
    later = Digests(file)
    assert later.of(checkpoint) == first
    assert later.computed == 3


def test_what_is_gone_is_forgotten(checkpoint, file):
    Digests(file).of(checkpoint)
    (checkpoint / "b.safetensors").unlink()
    Digests(file).of(checkpoint)
    assert len(json.loads(file.read_text())) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_memory(checkpoint, tmp_path):
    (tmp_path / "taken").write_text("")
    digests = Digests(tmp_path / "taken" / "digests.json")
    assert digests.of(checkpoint) == Digests().of(checkpoint)


def test_a_file_that_is_not_there_raises_what_reading_it_raises(checkpoint):
    (checkpoint / "a.safetensors").unlink()
    (checkpoint / "a.safetensors").symlink_to(checkpoint / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        Digests().begin(checkpoint).result(10)
