"""Bytes between the host and arrays, by the way that CUDA needs, which works on every device."""

import io
import os

import mlx.core as mx
import numpy as np
import pytest
from toy_family import full

from darkbloom_core.contracts import PartKey
from darkbloom_core.engine import _host
from darkbloom_core.engine._host import PIECE_BYTES, _ArrayFile, array_of, bytes_of, copied, loaded
from darkbloom_core.engine._parts import part_array
from darkbloom_core.engine._spill import Spill
from darkbloom_core.prefix import PartLayout, StagedPart

SIZES = (1, 2, 127, 128, 4096, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 5)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_go_up_and_come_down_as_they_are(size):
    data = memoryview(os.urandom(size))
    for array in (array_of(data), loaded(data), copied(loaded(data))):
        assert array.dtype == mx.uint8
        assert array.shape == (size,)
        assert bytes_of(array) == data


def test_where_the_device_has_memory_of_its_own_its_array_is_not_asked_for_its_memory(monkeypatch):
    array = mx.array([1.5, -0.0, float("nan"), 7.0])
    copies = []
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_host, "copied", lambda one: copies.append(copied(one)) or copies[-1])
    found = bytes_of(array)
    assert len(copies) == 1
    assert copies[0] is not array
    assert bytes(found) == bytes(memoryview(array).cast("B"))


def test_where_the_device_has_memory_of_its_own_bytes_are_loaded(monkeypatch):
    seen = []
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_host, "loaded", lambda data: seen.append(data) or loaded(data))
    assert bytes_of(array_of(memoryview(b"seven"))) == b"seven"
    assert len(seen) == 1


def test_bytes_go_up_in_pieces(monkeypatch):
    files, load = [], mx.load
    monkeypatch.setattr(mx, "load", lambda file, **more: files.append(file) or load(file, **more))
    loaded(memoryview(bytes(2 * PIECE_BYTES + 5)))
    assert len(files) == 3


def test_parts_go_to_and_from_tiers_that_way(monkeypatch):
    seen = []
    monkeypatch.setattr(_host, "loaded", lambda data: seen.append("loaded") or loaded(data))
    monkeypatch.setattr(_host, "copied", lambda array: seen.append("copied") or copied(array))
    layout = PartLayout([full()], 256)
    data = memoryview(os.urandom(layout.of([256]).part_bytes(0, "full")))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    array = part_array(layout, StagedPart(0, "full", None, data))
    mx.eval(array)
    offered = []
    spill = Spill(lambda _, take: offered.append(bytes(take())), lambda _: None)
    spill.offer(PartKey(b"name", "full"), array)
    spill.wait()
    spill.close()
    assert seen == ["loaded", "copied"]
    assert offered == [bytes(data)]


def test_a_copy_does_not_change_with_what_it_is_of():
    array = mx.zeros((64,), mx.uint8)
    mx.eval(array)
    copy = copied(array)
    memoryview(array)[0] = 9  # what MLX allows, and nothing here does
    assert copy[0].item() == 0


def test_the_file_is_one_of_numpys_and_can_be_sought_in():
    file = _ArrayFile(memoryview(b"abcdef"))
    assert np.load(io.BytesIO(file.read())).tobytes() == b"abcdef"
    assert file.read() == b""
    assert file.seek(-2, io.SEEK_END) == file.tell()
    assert file.read() == b"ef"
    file.seek(0)
    assert file.read(6) == b"\x93NUMPY"
    file.seek(2, io.SEEK_CUR)
    assert file.tell() == 8
