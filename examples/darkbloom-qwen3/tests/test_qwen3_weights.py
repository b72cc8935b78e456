"""Tensors that do not fit are one error that names them; a checkpoint's own code is never run."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from darkbloom_core.errors import CheckpointError


def change(path, edit):
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor_is_named(copy_of, load):
    path = copy_of("transformers")
    change(path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.1\.self_attn\.q_norm\.weight"):
        load(path)


def test_an_unexpected_tensor_is_named(copy_of, load):
    path = copy_of("transformers")
    change(path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(128)}))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(path)


def test_a_wrong_shape_is_named(copy_of, load):
    with pytest.raises(
        CheckpointError, match=r"mlp\.up_proj\.weight has shape \[128, 64\] instead of \[256, 64\]"
    ):
        load(copy_of("transformers", intermediate_size=256))


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_a_quantised_module_without_one_of_its_parts_is_named(copy_of, load, part):
    path = copy_of("mlx")
    change(path, lambda tensors: tensors.pop(f"model.layers.2.mlp.up_proj.{part}"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\."):
        load(path)


def test_scales_that_are_no_numbers_are_named(copy_of, load):
    path = copy_of("mlx")
    change(path, lambda tensors: tensors["lm_head.scales"].fill(np.nan))
    with pytest.raises(CheckpointError, match=r"lm_head\.scales"):
        load(path)


def test_quantisation_that_mlx_does_not_have_is_an_error_of_the_config(copy_of, load):
    with pytest.raises(CheckpointError, match=r"config\.json: quantization"):
        load(copy_of("mlx", quantization={"bits": 7, "group_size": 64}))


def test_a_tied_head_that_is_stored_all_the_same_is_left_alone(copy_of, load, checkpoints):
    path = copy_of("publisher")
    for file in path.glob("model*"):
        file.unlink()
    tensors = checkpoints.dense_tensors("publisher")
    save_file({**tensors, "lm_head.weight": np.zeros((280, 64), np.float32)}, path / "model.safetensors")
    assert load(path).weight_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_progress_ends_at_all_bytes(folder):
    from darkbloom_qwen3._family import Qwen3Family

    from darkbloom_core.contracts import Device, Placement

    path, reports = folder("mlx"), []
    description = Qwen3Family().describe(json.loads((path / "config.json").read_text()), Device("cpu"))
    Qwen3Family().load(path, description, Placement(Device("cpu")), lambda *report: reports.append(report))
    done, all_bytes = reports[-1]
    assert done == all_bytes > 0
    assert reports == sorted(reports)


def test_code_that_a_checkpoint_brings_is_not_run(copy_of, load, tmp_path):
    marker = tmp_path / "it ran"
    path = copy_of(
        "transformers", auto_map={"AutoModelForCausalLM": "modeling.Model"}, model_file="modeling.py"
    )
    (path / "modeling.py").write_text(f"open({str(marker)!r}, 'w')")
    model = load(path)
    assert not marker.exists()
    assert {"auto_map", "model_file"} <= set(model.description.ignored_fields)


def test_the_stop_tokens_are_those_of_all_files_together(copy_of, load, checkpoints):
    names = list(checkpoints.CONTROL_TOKENS)
    path = copy_of("transformers", eos_token_id=[3, checkpoints.END_ID])
    assert load(path).stop_ids == {3, checkpoints.END_ID, 256 + names.index("<|endoftext|>")}
