"""The vision tower loads strictly and computes what the reference does. (The core does not use it yet.)"""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from darkbloom_core.contracts import Device, Placement
from darkbloom_core.errors import CheckpointError


@pytest.fixture
def spoil(random_checkpoint, family, tmp_path):
    """Load a copy of a random checkpoint after changing its tensors."""

    def spoil(model, layout, change):
        folder = tmp_path / "checkpoint"
        shutil.copytree(random_checkpoint(model, layout), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        description = family.describe(json.loads((folder / "config.json").read_text()), Device("cpu"))
        return family.load(folder, description, Placement(Device("cpu")))

    return spoil


@pytest.mark.parametrize("name", ["moe", "edge", "demo"])
def test_soft_tokens_agree_with_the_reference(
    name, checkpoints, random_checkpoint, demo_folder, load, golden
):
    """With clipped linears, with standardising, and for a picture that is padded."""
    loaded = load(demo_folder if name == "demo" else random_checkpoint(name, "publisher"))
    patches, positions = checkpoints.pictures(checkpoints.PICTURES[name])
    ours = np.array(loaded.tower(mx.array(patches), mx.array(positions)))
    for number, found in enumerate(ours):
        reference = golden("pictures")[f"{name}{number}"]
        assert np.abs(found[: len(reference)] - reference).max() <= 1e-5 * np.abs(reference).max()


@pytest.mark.parametrize(
    ("layout", "has_tower"), [("mlx", True), ("transformers", True), ("mlx-text", False)]
)
def test_every_layout_that_has_a_tower_loads_it(layout, has_tower, random_checkpoint, load):
    assert (load(random_checkpoint("moe", layout)).tower is not None) == has_tower


def test_a_conversion_for_text_alone_has_no_tower_although_its_config_does(spoil):
    def drop(tensors):
        for name in [name for name in tensors if "vision" in name]:
            del tensors[name]

    assert spoil("dense", "mlx", drop).tower is None


@pytest.mark.parametrize(("layout", "prefix"), [("publisher", "model."), ("mlx", "")])
def test_a_tower_is_loaded_whole_or_not_at_all(layout, prefix, spoil):
    gone = f"{prefix}vision_tower.encoder.layers.0.self_attn.k_proj.linear.weight"
    extra = f"{prefix}vision_tower.encoder.layers.1.mlp.up_proj.linear.weight"

    def change(tensors):
        del tensors[gone]
        tensors[extra] = np.ones((2, 2), np.float32)

    with pytest.raises(CheckpointError) as error:
        spoil("dense", layout, change)
    assert f"missing {gone}" in error.value.message
    assert f"unexpected {extra}" in error.value.message


def test_other_towers_are_left_unread(spoil, random_checkpoint, load):
    def add(tensors):
        tensors["model.audio_tower.layers.0.weight"] = np.full(1000, np.nan, np.float32)
        tensors["model.embed_audio.embedding_projection.weight"] = np.ones((2, 2), np.float32)

    plain = load(random_checkpoint("dense", "publisher"))
    assert spoil("dense", "publisher", add).weight_bytes == plain.weight_bytes


def test_bounds_may_be_infinite(spoil):
    """As in a checkpoint that was never clipped."""

    def unbound(tensors):
        for name in tensors:
            if name.endswith(("_min", "_max")):
                tensors[name] = np.array(-np.inf if name.endswith("_min") else np.inf, np.float32)

    assert spoil("edge", "publisher", unbound).tower is not None
