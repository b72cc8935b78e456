"""Loading: each fault of the files is one line that names what is wrong, and no code of a checkpoint runs."""

import json
import struct
import sys

import mlx.core as mx
import numpy as np
import pytest

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import Device, Placement
from darkbloom_core.errors import CheckpointError

CPU = Device("cpu")


@pytest.fixture
def load_anew(family):
    """Read, describe and load a folder, as a slot does."""

    def load(folder, progress=None):
        description = family.describe(read_config(folder), CPU)
        return family.load(folder, description, Placement(CPU), progress)

    return load


def fault(load, folder):
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = caught.value.message
    assert "\n" not in message
    assert str(folder) in message
    return message


def edit(checkpoints, folder, layout, change):
    """Write a checkpoint whose tensors ``change`` has altered."""
    checkpoints.write(folder, "yarn", layout)
    stored = checkpoints.tensors(layout)
    change(stored)
    checkpoints.write_safetensors(folder / "model.safetensors", stored)


def test_shards_load_as_one_file_does(checkpoints, load, random_checkpoint, tmp_path, load_anew, run_engine):
    checkpoints.write(tmp_path, "yarn", "publisher", shards=3)
    sharded, single = load_anew(tmp_path), load(random_checkpoint("yarn", "publisher"))
    ids = checkpoints.prompt()[:9]
    assert (run_engine(sharded, ids, [9]) == run_engine(single, ids, [9])).all()
    assert sharded.weight_bytes == single.weight_bytes


def test_stop_ids_come_from_all_three_files(checkpoints, load, random_checkpoint):
    loaded = load(random_checkpoint("yarn", "transformers"))
    named = {
        256 + checkpoints.CONTROL_TOKENS.index(name) for name in ("<|return|>", "<|call|>", "<|endoftext|>")
    }
    # the config of these checkpoints has <|return|>, their generation config the last token
    assert loaded.stop_ids == named | {checkpoints.VOCABULARY - 7, checkpoints.VOCABULARY - 1}


def test_progress_ends_at_the_bytes_of_the_file(checkpoints, tmp_path, load_anew):
    checkpoints.write(tmp_path, "yarn", "mlx-affine-4")
    seen = []
    load_anew(tmp_path, lambda done, in_all: seen.append((done, in_all)))
    done, in_all = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == in_all[-1]
    assert set(in_all) == {in_all[0]}


def test_weight_bytes_are_what_the_arrays_take(load, demo_folder):
    """Plain weights in bfloat16 on disk are float32 on the CPU backend."""
    in_file = (demo_folder / "model.safetensors").stat().st_size
    assert load(demo_folder).weight_bytes == pytest.approx(2 * in_file, rel=0.01)


@pytest.mark.parametrize("layout", ["transformers", "publisher", "mlx-mixed"])
def test_peak_memory_while_loading_stays_near_the_weights(
    layout, tmp_path, checkpoints, load_anew, monkeypatch
):
    """With more layers, so that a layer's experts weigh against the whole about as they do in the real models."""
    monkeypatch.setattr(checkpoints, "EXPERTS", 16)
    monkeypatch.setattr(checkpoints, "LAYERS", 16)
    checkpoints.write(tmp_path, "yarn", layout)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load_anew(tmp_path)
    peak = mx.get_peak_memory() - before
    assert peak <= 1.15 * loaded.weight_bytes


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named(checkpoints, tmp_path, load_anew):
    def change(stored):
        del stored["model.layers.1.self_attn.sinks"]
        stored["model.layers.0.extra"] = ("F32", np.zeros(3, np.float32))
        stored["model.norm.weight"] = ("F32", np.zeros(7, np.float32))

    edit(checkpoints, tmp_path, "transformers", change)
    message = fault(load_anew, tmp_path)
    for expected in (
        "missing model.layers.1.self_attn.sinks",
        "unexpected model.layers.0.extra",
        "model.norm.weight has shape [7] instead of [64]",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("publisher", "model.layers.2.mlp.experts.gate_up_proj_blocks"),
        ("publisher", "model.layers.2.mlp.experts.down_proj_scales"),
        ("transformers", "model.layers.2.mlp.experts.gate_up_proj"),
        ("mlx-affine-8", "model.layers.2.mlp.experts.up_proj.scales"),
        ("mlx-affine-8", "model.layers.2.self_attn.q_proj.weight"),
        ("mlx-mxfp4-q8", "lm_head.biases"),
    ],
)
def test_a_missing_piece_of_any_layout_is_named(layout, name, checkpoints, tmp_path, load_anew):
    edit(checkpoints, tmp_path, layout, lambda stored: stored.pop(name))
    message = fault(load_anew, tmp_path)
    assert name.removesuffix(".scales").removesuffix("_blocks") in message


def test_a_wrong_dtype_is_named(checkpoints, tmp_path, load_anew):
    def change(stored):
        stored["model.norm.weight"] = ("U8", np.ones(64, np.uint8))

    edit(checkpoints, tmp_path, "transformers", change)
    assert "tensor model.norm.weight is U8 instead of" in fault(load_anew, tmp_path)


def test_scales_that_are_nan_are_named(checkpoints, tmp_path, load_anew):
    mxfp4 = "model.layers.1.mlp.experts.down_proj_scales"
    edit(checkpoints, tmp_path, "publisher", lambda stored: stored[mxfp4][1].flat.__setitem__(5, 255))
    assert f"tensor {mxfp4} has scales that are NaN" in fault(load_anew, tmp_path)
    affine = "model.layers.1.self_attn.k_proj.scales"
    edit(checkpoints, tmp_path, "mlx-affine-8", lambda stored: stored[affine][1].flat.__setitem__(5, np.nan))
    assert f"tensor {affine} has values that are not finite" in fault(load_anew, tmp_path)


def test_config_and_weights_that_disagree_about_quantisation_are_refused(checkpoints, tmp_path, load_anew):
    def rewrite(layout, changes):
        checkpoints.write(tmp_path, "yarn", layout)
        config = checkpoints.config("yarn", layout) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))

    rewrite("transformers", {"quantization_config": {"quant_method": "mxfp4"}})
    assert "config.json says that the experts are quantised" in fault(load_anew, tmp_path)
    rewrite("publisher", {"quantization_config": None})
    assert "is quantised, but config.json has no quantization" in fault(load_anew, tmp_path)
    packed = checkpoints.config("yarn", "mlx-affine-8")["quantization"] | {
        "lm_head": {"group_size": 64, "bits": 8}
    }
    rewrite("mlx-affine-8", {"quantization": packed, "quantization_config": packed})
    assert "lm_head is packed as" in fault(load_anew, tmp_path)


def test_faults_of_the_files_are_named(checkpoints, tmp_path, load_anew):
    """One after the other, each mended before the next."""
    checkpoints.write(tmp_path, "yarn", "transformers", shards=2)
    shard, index = tmp_path / "model-00002-of-00002.safetensors", tmp_path / "model.safetensors.index.json"
    whole, listed = shard.read_bytes(), index.read_text()

    shard.write_bytes(whole[: len(whole) // 2])
    assert str(shard) in fault(load_anew, tmp_path)
    shard.unlink()
    assert str(shard) in fault(load_anew, tmp_path)
    shard.symlink_to(shard)
    assert f"{shard}: a loop" in fault(load_anew, tmp_path)
    shard.unlink()
    shard.write_bytes(whole)

    names = {name: file for name, file in json.loads(listed)["weight_map"].items() if file != shard.name}
    index.write_text(json.dumps({"weight_map": names}))
    assert str(shard) in fault(load_anew, tmp_path)
    index.write_text(listed)

    for name in ("tokenizer.json", "config.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        assert str(tmp_path / name) in fault(load_anew, tmp_path)
        (tmp_path / name).write_text("{")
        assert f"{tmp_path / name}: not JSON" in fault(load_anew, tmp_path)
        (tmp_path / name).write_text(content)

    load_anew(tmp_path)


def test_a_pickle_in_place_of_weights_is_named(checkpoints, tmp_path, load_anew):
    checkpoints.write(tmp_path, "yarn", "transformers")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert f"{tmp_path / 'pytorch_model.bin'}: a pickle" in fault(load_anew, tmp_path)


def test_code_in_a_checkpoint_is_not_run(checkpoints, tmp_path, family, load_anew):
    """Every way in which a checkpoint can bring code: none leaves its mark, and the checkpoint loads."""
    checkpoints.write(tmp_path, "yarn", "transformers")
    planted = tmp_path / "executed"
    code = f"open({str(planted)!r}, 'w').close()\n"
    for name in ("modeling_gpt_oss.py", "configuration_gpt_oss.py", "tokenization.py", "model.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "__init__.py").write_text(code)
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "auto_map": {
            "AutoConfig": "configuration_gpt_oss.GptOssConfig",
            "AutoModelForCausalLM": "modeling_gpt_oss.GptOssForCausalLM",
        },
        "model_file": "model.py",
        "trust_remote_code": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer_config = {
        "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]},
        "eos_token": "<|return|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ cycler.__init__.__globals__.os.system('touch " + str(planted) + "') }}"
    )
    modules = set(sys.modules)
    loaded = load_anew(tmp_path)
    codec = family.codec(tmp_path, loaded.description)
    with pytest.raises(Exception, match="cannot render"):
        codec._template.render({"messages": []})
    assert not planted.exists()
    assert not [name for name in set(sys.modules) - modules if str(tmp_path) in str(sys.modules[name])]
    assert "never run" in loaded.description.notes[0]


def test_a_header_that_promises_more_than_the_file_holds_is_refused(checkpoints, tmp_path, load_anew):
    checkpoints.write(tmp_path, "yarn", "transformers")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 1 << 40) + whole[8:])
    assert f"{file}: truncated" in fault(load_anew, tmp_path)
