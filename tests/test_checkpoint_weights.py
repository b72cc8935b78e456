"""Opening and loading safetensors: faults are found from the headers and name the file."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from darkbloom_core.checkpoint import Weights, check_tensors
from darkbloom_core.errors import CheckpointError


def save(file, **tensors):
    mx.save_safetensors(str(file), {name: mx.array(value) for name, value in tensors.items()})


def shard_up(folder, indexed=True):
    save(folder / "model-00001-of-00002.safetensors", a=[1.0, 2.0], b=[[3.0]])
    save(folder / "model-00002-of-00002.safetensors", c=[4.0])
    names = {"a": 1, "b": 1, "c": 2}
    if indexed:
        write_index(
            folder, {name: f"model-{shard:05d}-of-00002.safetensors" for name, shard in names.items()}
        )


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def fault(folder, call=Weights):
    with pytest.raises(CheckpointError) as caught:
        call(folder)
    message = caught.value.message
    assert "\n" not in message
    return message


def test_names_shapes_dtypes_and_bytes_are_known_without_reading_data(tmp_path):
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"),
        {"w": mx.zeros((3, 4), mx.bfloat16), "q": mx.zeros((8,), mx.uint8), "s": mx.array(1.0)},
    )
    weights = Weights(tmp_path)
    assert weights.shapes == {"w": (3, 4), "q": (8,), "s": ()}
    assert weights.tensors["w"].dtype == "BF16"
    assert weights.tensors["q"].file == tmp_path / "model.safetensors"
    assert weights.disk_bytes == 3 * 4 * 2 + 8 + 4


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_load_as_one_with_progress_that_ends_at_the_whole(tmp_path, indexed):
    shard_up(tmp_path, indexed)
    weights = Weights(tmp_path)
    seen = []
    arrays = weights.load(lambda done, in_all: seen.append((done, in_all)))
    assert {name: np.array(array).tolist() for name, array in arrays.items()} == {
        "a": [1.0, 2.0],
        "b": [[3.0]],
        "c": [4.0],
    }
    assert seen == [(8, 16), (12, 16), (16, 16)]


def test_only_wanted_tensors_are_read(tmp_path):
    shard_up(tmp_path)
    seen = []
    arrays = Weights(tmp_path).load(lambda *now: seen.append(now), want=lambda name: name != "a")
    assert sorted(arrays) == ["b", "c"]
    assert seen[-1] == (8, 8)


@pytest.mark.parametrize("cut", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path, cut):
    file = tmp_path / "model.safetensors"
    save(file, a=[1.0] * 100)
    file.write_bytes(file.read_bytes()[:cut])
    assert fault(tmp_path).startswith(f"{file}: truncated or not a safetensors file")


def test_a_file_that_is_something_else_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    header = b"this is not a JSON header"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert str(file) in fault(tmp_path)


def test_a_shard_missing_from_the_disk_is_named(tmp_path):
    shard_up(tmp_path)
    gone = tmp_path / "model-00002-of-00002.safetensors"
    gone.unlink()
    assert fault(tmp_path) == f"{gone}: no such file, but model.safetensors.index.json names it"


def test_a_shard_missing_without_an_index_is_named(tmp_path):
    shard_up(tmp_path, indexed=False)
    gone = tmp_path / "model-00001-of-00002.safetensors"
    gone.unlink()
    assert fault(tmp_path).startswith(f"{gone}: no such file")


def test_a_shard_missing_from_the_index_is_named(tmp_path):
    shard_up(tmp_path)
    write_index(tmp_path, dict.fromkeys("ab", "model-00001-of-00002.safetensors"))
    assert "model-00002-of-00002.safetensors" in fault(tmp_path)


def test_index_and_shards_that_disagree_about_a_tensor_are_named(tmp_path):
    shard_up(tmp_path)
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    write_index(tmp_path, {"a": first, "b": second, "c": second})
    assert fault(tmp_path).startswith(f"{tmp_path / second}: tensor b is not in it")
    write_index(tmp_path, {"a": first, "c": second})
    message = fault(tmp_path)
    assert "tensor b" in message
    assert first in message


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "model.bin"])
def test_an_index_names_only_safetensors_of_its_own_folder(tmp_path, name):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(tmp_path / "elsewhere.safetensors", a=[1.0])
    save(folder / "model.safetensors", a=[1.0])
    (folder / "model.safetensors").rename(folder / "model.bin")
    write_index(folder, {"a": name})
    message = fault(folder)
    assert "model.safetensors.index.json" in message
    assert name in message


@pytest.mark.parametrize("content", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_named(tmp_path, content):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    assert fault(tmp_path).startswith(f"{index}: ")


def test_a_pickle_is_refused_and_not_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    import pickle

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    message = fault(tmp_path)
    assert message.startswith(f"{tmp_path / 'pytorch_model.bin'}: a pickle")
    assert not (tmp_path / "executed").exists()


def test_no_weights_at_all_is_named(tmp_path):
    assert fault(tmp_path).startswith(f"{tmp_path / 'model.safetensors'}: no such file")


def test_a_loop_of_links_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(file)
    assert fault(tmp_path) == f"{file}: a loop of symbolic links"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named_with_file_and_tensor(tmp_path, bad):
    save(tmp_path / "model.safetensors", good=[1.0], scales=[1.0, bad])
    message = fault(tmp_path, lambda folder: Weights(folder).load())
    assert str(tmp_path / "model.safetensors") in message
    assert "tensor scales" in message


def test_a_single_value_without_axes_may_be_infinite_but_must_be_a_number(tmp_path):
    save(tmp_path / "model.safetensors", bound=float("inf"))
    assert Weights(tmp_path).load()["bound"].item() == float("inf")
    save(tmp_path / "model.safetensors", bound=float("nan"))
    assert "tensor bound" in fault(tmp_path, lambda folder: Weights(folder).load())


def test_up_to_ten_wrong_tensors_are_named_in_one_error(tmp_path):
    expected = {"kept": (2, 3), "gone": (1,), "bent": (4, 4)}
    found = {"kept": (2, 3), "bent": (4, 5), "extra": (1,)}
    message = fault(tmp_path, lambda folder: check_tensors(expected, found, folder))
    assert str(tmp_path) in message
    assert "missing gone; unexpected extra; bent has shape [4, 5] instead of [4, 4]" in message
    many = {f"t{n}": (1,) for n in range(25)}
    message = fault(tmp_path, lambda folder: check_tensors(many, {}, folder))
    assert message.count("missing t") == 10
    assert message.endswith("and 15 more")
    check_tensors(expected, expected, tmp_path)
