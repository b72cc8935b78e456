"""A config is understood whole or refused by the name of the field at fault."""

import pytest
from darkbloom_qwen3._family import Qwen3Family

from darkbloom_core.contracts import Device
from darkbloom_core.errors import UnsupportedCheckpoint

CPU = Device("cpu")

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The published values of Qwen3-0.6B."""


def describe(**changes):
    config = {name: value for name, value in {**QWEN3_0_6B, **changes}.items() if value is not ...}
    return Qwen3Family().describe(config, CPU)


def test_a_published_config_gives_its_layers_and_their_bytes():
    description = describe()
    assert len(description.layers) == 28
    assert description.kv_bytes_per_token == 28 * 2 * 8 * 128 * 2  # layers, K and V, heads, dimensions, bytes
    assert description.context_tokens == 40960
    assert description.ignored_fields == ()


def test_every_layout_describes_the_same_model(checkpoints):
    described = [Qwen3Family().describe(checkpoints.config(layout), CPU) for layout in checkpoints.LAYOUTS]
    assert len({description.layers for description in described}) == 1
    assert {description.ignored_fields for description in described} == {()}


def test_weights_and_kv_are_kept_in_the_dtype_that_the_config_says(copy_of, folder, load):
    halved = load(copy_of("transformers", dtype="bfloat16"))
    assert halved.description.kv_dtypes == {"bfloat16"}
    assert halved.weight_bytes == load(folder("transformers")).weight_bytes / 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention"] * 27 + ["sliding_attention"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1000000}),
        ("rope_theta", ...),
        ("rope_theta", "large"),
        ("hidden_size", ...),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", True),
        ("vocab_size", 0),
        ("rms_norm_eps", None),
        ("num_attention_heads", 12),
        ("dtype", "float8_e4m3fn"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {"mode": "mxfp4", "bits": 4, "group_size": 32}),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(field, value):
    with pytest.raises(UnsupportedCheckpoint, match=field):
        describe(**{field: value})


def test_two_rotary_bases_that_differ_are_refused():
    with pytest.raises(UnsupportedCheckpoint, match="rope_theta is given twice"):
        describe(rope_parameters={"rope_type": "default", "rope_theta": 10000})


def test_a_module_quantised_in_an_unknown_way_is_refused_by_name():
    override = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    with pytest.raises(UnsupportedCheckpoint, match=r"model\.layers\.0\.mlp\.up_proj"):
        describe(quantization={"bits": 4, "group_size": 64, "model.layers.0.mlp.up_proj": override})


def test_fields_that_nobody_knows_are_listed():
    assert describe(tool_of_the_day="hammer").ignored_fields == ("tool_of_the_day",)
