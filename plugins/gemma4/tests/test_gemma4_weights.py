"""Loading: every weight layout, quantised ones too, and one clear error for anything wrong."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from darkbloom_core.contracts import Device, Placement
from darkbloom_core.errors import CheckpointError

CPU = Device("cpu")
GROUP_SIZE = 32
DEFAULT = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}


@pytest.fixture
def copy_of(random_checkpoint, tmp_path):
    """A copy of a random checkpoint that a test may spoil."""

    def copy(model, layout="publisher"):
        folder = tmp_path / "checkpoint"
        shutil.copytree(random_checkpoint(model, layout), folder)
        return folder

    return copy


@pytest.fixture
def load_anew(family):
    def load(folder, progress=None):
        description = family.describe(json.loads((folder / "config.json").read_text()), CPU)
        return family.load(folder, description, Placement(CPU), progress)

    return load


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def change_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def quantize(tensors, scheme):
    """``tensors`` of an MLX conversion, quantised where ``scheme(module)`` says how; and dequantised again."""
    packed, plain, schemes = {}, {}, {}
    for name, array in tensors.items():
        module = name.removesuffix(".weight")
        found = scheme(module) if name.startswith("language_model.") and array.ndim > 1 else None
        if found is None:
            packed[name] = plain[name] = array
            continue
        weight, scales, *biases = mx.quantize(array, **found)
        packed |= {f"{module}.weight": weight, f"{module}.scales": scales}
        packed |= {f"{module}.biases": each for each in biases}
        plain[name] = mx.dequantize(weight, scales, *biases, **found, dtype=mx.float32)
        schemes[module] = found
    return packed, plain, schemes


def write_quantized(folder, checkpoints, model, scheme):
    """An MLX conversion of a random checkpoint, and its dequantised twin. Returns both folders."""
    tensors = {name: mx.array(array) for name, array in checkpoints.named_weights(model, "mlx").items()}
    packed, plain, schemes = quantize(tensors, scheme)
    config = checkpoints.config(model, "mlx")
    overrides = {module: found for module, found in schemes.items() if found != DEFAULT}
    for name, arrays, extra in (
        ("packed", packed, {"quantization": DEFAULT | overrides}),
        ("plain", plain, {}),
    ):
        checkpoints.write(folder / name, model, "mlx")
        mx.save_safetensors(str(folder / name / "model.safetensors"), arrays)
        (folder / name / "config.json").write_text(json.dumps(config | extra))
    return folder / "packed", folder / "plain"


def affine(bits):
    return lambda module: DEFAULT | {"bits": bits}


def mixed(module):
    """As converters do it: the router in 8 bits, the down projections in 8, norms and the like in none."""
    if "router" in module or "down_proj" in module:
        return DEFAULT | {"bits": 8}
    return DEFAULT


def in_mode(mode, bits, group_size):
    def scheme(module):
        return {"group_size": group_size, "bits": bits, "mode": mode}

    return scheme


SCHEMES = {
    "4 bit": affine(4),
    "8 bit": affine(8),
    "mixed": mixed,
    "mxfp4": in_mode("mxfp4", 4, 32),
    "mxfp8": in_mode("mxfp8", 8, 32),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", ["moe", "edge"])
def test_a_quantised_checkpoint_computes_what_its_dequantised_twin_does(
    model, scheme, tmp_path, checkpoints, load_anew, run
):
    packed, plain = write_quantized(tmp_path, checkpoints, model, SCHEMES[scheme])
    prompt = checkpoints.prompts()[-1]
    loaded = load_anew(packed)
    ours, twin = run(loaded, prompt, [len(prompt)]), run(load_anew(plain), prompt, [len(prompt)])
    assert np.abs(ours - twin).max() <= 2e-5 * np.abs(twin).max()
    assert loaded.weight_bytes < 0.6 * load_anew(plain).weight_bytes


def test_eight_bits_stay_near_the_reference(tmp_path, checkpoints, load_anew, run, golden):
    """Within a twentieth of the largest logit; measured .031, of random weights, which quantise worst."""
    packed, _ = write_quantized(tmp_path, checkpoints, "dense", affine(8))
    loaded = load_anew(packed)
    ours = np.concatenate([run(loaded, prompt, [len(prompt)]) for prompt in checkpoints.prompts()])
    reference = golden("random")["dense"]
    assert np.abs(ours - reference).max() <= 0.05 * np.abs(reference).max()


@pytest.mark.soak
def test_the_demo_checkpoint_in_four_bits_and_bfloat16_still_answers(
    tmp_path, demo_folder, demo_prompts, family, load_anew, ask
):
    """Three of its prompts. (All of ``prompts.json`` is answered the same in 4 and in 8 bits.)"""
    folder = tmp_path / "quantized"
    shutil.copytree(demo_folder, folder)
    tensors = {}
    for name, array in mx.load(str(demo_folder / "model.safetensors")).items():
        name = name.replace("model.language_model.", "language_model.model.")
        if name.endswith("experts.gate_up_proj"):
            place = name.replace("gate_up_proj", "switch_glu")
            tensors[f"{place}.gate_proj.weight"], tensors[f"{place}.up_proj.weight"] = mx.split(
                array, 2, axis=1
            )
        elif name.endswith("experts.down_proj"):
            tensors[name.replace("down_proj", "switch_glu.down_proj.weight")] = array
        else:
            tensors[name] = array
    packed, _, _ = quantize(tensors, affine(4))
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    change_config(folder, quantization=DEFAULT)
    loaded = load_anew(folder)
    assert loaded.description.kv_dtypes == {"bfloat16"}
    codec = family.codec(folder, loaded.description)
    first_of_task = {request["task"]: (request, expected) for request, expected in reversed(demo_prompts)}
    for task in ("capital", "addition", "tool"):
        request, expected = first_of_task[task]
        assert ask(loaded, codec, request) == expected, request["messages"]


@pytest.mark.parametrize("model", ["dense", "edge"])
def test_bfloat16_stays_near_the_reference(model, copy_of, checkpoints, load_anew, run, golden):
    """Within a twentieth of the largest logit; measured .022 and .016."""
    folder = copy_of(model)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_anew(folder)
    assert loaded.description.kv_dtypes == {"bfloat16"}
    ours = np.concatenate([run(loaded, prompt, [len(prompt)]) for prompt in checkpoints.prompts()])
    reference = golden("random")[model]
    assert np.abs(ours - reference).max() <= 0.05 * np.abs(reference).max()


def test_untied_heads_load(copy_of, load_anew, run, golden, checkpoints):
    folder = copy_of("dense")
    change_tensors(
        folder, lambda t: t.update({"lm_head.weight": t["model.language_model.embed_tokens.weight"].copy()})
    )
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    prompt = checkpoints.prompts()[0]
    assert np.allclose(run(load_anew(folder), prompt, [1]), golden("random")["dense"][:1], atol=1e-4)


@pytest.mark.parametrize("layout", ["publisher", "transformers-text", "mlx"])
def test_what_is_never_used_is_not_read(layout, random_checkpoint, load, checkpoints):
    """Layers that borrow need no K and V of their own, but the publisher's files and those of transformers have them."""
    tensors = checkpoints.weights("edge")
    borrowed = [
        f"layers.{index}.self_attn.{name}.weight" for index in (4, 5, 6) for name in ("k_proj", "v_proj")
    ]
    borrowed += [f"layers.{index}.self_attn.k_norm.weight" for index in (4, 5, 6)]
    expected = sum(array.nbytes for name, array in tensors.items() if name not in borrowed)
    if not layout.endswith("text"):
        expected += sum(array.nbytes for array in checkpoints.vision_weights("edge").values())
    assert load(random_checkpoint("edge", layout)).weight_bytes == expected


def test_buffers_of_older_files_are_left_aside(copy_of, load_anew):
    folder = copy_of("dense")
    name = "model.language_model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: np.ones(16, np.float32)}))
    load_anew(folder)


def test_progress_counts_the_bytes_that_are_read(random_checkpoint, load_anew):
    seen = []
    load_anew(random_checkpoint("dense", "publisher"), lambda done, total: seen.append((done, total)))
    totals = {total for _, total in seen}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert totals == {seen[-1][0]}


def test_loading_peaks_little_above_the_weights(demo_folder, load_anew):
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load_anew(demo_folder)
    assert mx.get_peak_memory() - before <= 1.15 * loaded.weight_bytes


def test_memory_is_what_the_description_promised(demo_folder, load):
    loaded = load(demo_folder)
    on_disk = sum(array.nbytes for array in mx.load(str(demo_folder / "model.safetensors")).values())
    assert loaded.weight_bytes == loaded.description.memory_per_disk_byte * on_disk


def test_missing_unexpected_and_wrong_tensors_are_named_in_one_error(copy_of, load_anew):
    folder = copy_of("moe")
    place = "model.language_model.layers.1."

    def spoil(tensors):
        del tensors[f"{place}mlp.up_proj.weight"]
        tensors["model.language_model.extra.weight"] = np.ones(2, np.float32)
        tensors[f"{place}experts.down_proj"] = tensors[f"{place}experts.down_proj"][:, :, :3].copy()

    change_tensors(folder, spoil)
    with pytest.raises(CheckpointError) as error:
        load_anew(folder)
    message = error.value.message
    assert f"missing {place}mlp.up_proj.weight" in message
    assert "unexpected model.language_model.extra.weight" in message
    assert f"{place}experts.down_proj has shape [6, 64, 3] instead of [6, 64, 64]" in message
    assert str(folder) in message
    assert "\n" not in message


def test_half_of_a_pair_of_fused_experts_is_missing_by_name(copy_of, load_anew):
    folder = copy_of("moe")
    change_tensors(folder, lambda t: t.pop("model.language_model.layers.0.experts.gate_up_proj"))
    with pytest.raises(
        CheckpointError, match=r"missing model\.language_model\.layers\.0\.experts\.gate_up_proj"
    ):
        load_anew(folder)


def test_a_checkpoint_of_something_else_says_what_is_missing(copy_of, load_anew):
    folder = copy_of("dense")
    save_file({"transformer.h.0.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight.*and \d+ more"):
        load_anew(folder)


def test_scales_without_a_quantised_config_are_unexpected(tmp_path, checkpoints, load_anew):
    packed, plain = write_quantized(tmp_path, checkpoints, "dense", affine(4))
    shutil.copy(plain / "config.json", packed / "config.json")
    with pytest.raises(CheckpointError, match=r"unexpected language_model\.model\..*\.scales"):
        load_anew(packed)


def test_experts_that_are_not_quantised_after_all_are_an_error(tmp_path, checkpoints, load_anew):
    """KV was promised in another dtype."""
    packed, _ = write_quantized(
        tmp_path, checkpoints, "moe", lambda module: DEFAULT if module.endswith("embed_tokens") else None
    )
    with pytest.raises(CheckpointError, match=r"experts\.switch_glu\.gate_proj is not quantised"):
        load_anew(packed)


def test_integers_in_place_of_floats_are_an_error(copy_of, load_anew):
    folder = copy_of("dense")
    name = "model.language_model.norm.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.int32)}))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor model\.language_model\.norm\.weight"
    ):
        load_anew(folder)


def test_values_that_are_not_numbers_are_an_error(copy_of, load_anew):
    folder = copy_of("dense")
    name = "model.language_model.layers.2.layer_scalar"
    change_tensors(folder, lambda tensors: tensors.update({name: np.array([np.nan], np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*layer_scalar"):
        load_anew(folder)


def test_a_folder_without_a_tokenizer_is_an_error(copy_of, load_anew):
    folder = copy_of("dense")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        load_anew(folder)


def test_stop_ids_come_from_config_generation_config_and_tokenizer(copy_of, load_anew):
    folder = copy_of("dense")
    assert load_anew(folder).stop_ids == {1, 6, 21}
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"], config["text_config"]["eos_token_id"] = [1, 50], 51
    (folder / "config.json").write_text(json.dumps(config))
    assert load_anew(folder).stop_ids == {1, 6, 50, 51}


def test_code_that_a_checkpoint_brings_is_never_run(copy_of, load_anew, family, tmp_path):
    folder = copy_of("dense")
    marker = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    auto_map = {
        "AutoConfig": "configuration_evil.Config",
        "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.Tokenizer", None],
    }
    change_config(folder, auto_map=auto_map, model_file="modeling_evil.py", trust_remote_code=True)
    tokenizer_config = {"auto_map": auto_map, "tokenizer_class": "Tokenizer", "tool_parser_type": "evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "bos_token": "<bos>"}))
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(f"{escape}{{{{ messages[0].content }}}}")
    loaded = load_anew(folder)
    codec = family.codec(folder, loaded.description)
    from darkbloom_core.contracts import Chat, Message, TextPart
    from darkbloom_core.errors import InvalidRequest

    with pytest.raises(InvalidRequest):
        codec.encode_chat(Chat(messages=(Message(role="user", content=(TextPart("hi"),)),)))
    assert not marker.exists()
