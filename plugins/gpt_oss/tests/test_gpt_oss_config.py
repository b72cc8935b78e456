"""What ``describe`` makes of configs: the published ones, each writer's, and those that it must refuse."""

import copy
import math

import pytest

from darkbloom_core.contracts import Device
from darkbloom_core.errors import UnsupportedCheckpoint

CPU, CUDA, METAL = Device("cpu"), Device("cuda"), Device("metal")

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
PUBLISHED_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
PUBLISHED_120B = PUBLISHED_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}


def changed(changes, base=PUBLISHED_20B):
    """``base`` with fields set, or removed where the value is ``...``; ``"a.b"`` reaches inside."""
    config = copy.deepcopy(base)
    for path, value in changes.items():
        *outer, name = path.split(".", 1)
        target = config[outer[0]] if outer else config
        name = name if outer else path
        if value is ...:
            target.pop(name, None)
        else:
            target[name] = value
    return config


def unquantised(changes=None):
    return changed({"quantization_config": ..., **(changes or {})})


@pytest.mark.parametrize(("config", "expected"), [(PUBLISHED_20B, 24576), (PUBLISHED_120B, 36864)])
def test_the_published_models_take_the_known_bytes_of_kv_per_token(family, config, expected):
    for device in (CUDA, METAL):
        description = family.describe(config, device)
        assert description.kv_bytes_per_token == expected
        assert description.kv_dtypes == {"bfloat16"}
        assert description.memory_per_disk_byte == 1.0
        assert (description.ignored_fields, description.notes) == ((), ())


@pytest.mark.parametrize(
    ("tokens", "size_bytes"),
    [
        (1, 49_152),
        (128, 6_291_456),
        (1024, 28_311_552),
        (4096, 103_809_024),
        (131_072, 3_224_371_200),
    ],
)
def test_a_sequence_takes_the_known_bytes_at_every_length(family, tokens, size_bytes):
    assert family.describe(PUBLISHED_20B, METAL).kv_bytes(tokens) == size_bytes


def test_on_the_cpu_backend_kv_and_plain_matrices_are_float32_and_described_so(family):
    description = family.describe(PUBLISHED_20B, CPU)
    assert description.kv_bytes_per_token == 2 * 24576
    assert "float32" in description.notes[0]
    plain, experts = 1.797e9, 19.11e9 * 4.25 / 8  # numbers; bytes, with a scale for every 32
    assert description.memory_per_disk_byte == pytest.approx(
        (4 * plain + experts) / (2 * plain + experts), 1e-3
    )
    assert family.describe(unquantised(), CPU).memory_per_disk_byte == 2.0
    stored_so = family.describe(unquantised({"torch_dtype": "float32"}), CPU)
    assert (stored_so.memory_per_disk_byte, stored_so.notes) == (1.0, ())


def test_a_description_says_what_the_model_is(family):
    description = family.describe(PUBLISHED_20B, CUDA)
    assert (description.family, description.model_type) == ("gpt-oss", "gpt_oss")
    assert description.context_tokens == 131072
    assert description.vocab_size == 201088
    assert description.hidden_size == 2880
    assert description.modalities == {"text"}
    sliding, full = description.layers[:2]
    assert (sliding.window, full.window) == (128, None)
    assert (full.q_heads, full.kv_heads, full.k_dim, full.v_dim) == (64, 8, 64, 64)
    assert full.sinks
    # YaRN multiplies queries and keys by 0.1 ln(factor) + 1
    assert full.scale == pytest.approx((0.1 * math.log(32) + 1) ** 2 / 8)


PLAIN_MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    ("quantization", "factor"),
    [
        (PLAIN_MLX, (4 + 64 / 64) / (4 + 32 / 64)),  # two scales for every 64 numbers grow from 16 to 32 bits
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, 1.0),
        ({"group_size": 128, "bits": 4}, 1.9966),  # rows of 2,880 make no groups of 128; those of 4,096 do
    ],
)
def test_the_mlx_communitys_quantisation_is_in_the_estimate_of_memory(family, quantization, factor):
    config = changed({"quantization": quantization, "quantization_config": quantization})
    assert family.describe(config, CPU).memory_per_disk_byte == pytest.approx(factor, 1e-4)
    assert family.describe(config, METAL).memory_per_disk_byte == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": YARN | {"rope_theta": 150000.0}},
        {"rope_parameters": YARN | {"rope_theta": 150000}},
        {"rope_scaling.type": "yarn", "rope_scaling.rope_type": ...},
        {"rope_scaling.original_max_position_embeddings": ...},
        {"initial_context_length": ..., "experts_per_token": ..., "swiglu_limit": ...},
        {"layer_types": ...},
        {"swiglu_alpha": 1.702, "dtype": "bfloat16", "hidden_act": ...},
        {"num_local_experts": ..., "num_experts": 32},
        {"torch_dtype": "torch.bfloat16", "dtype": "bfloat16"},
        {"quantization_config": ..., "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
        {"partial_rotary_factor": 1.0, "final_logit_softcapping": None, "num_shared_experts": 0},
    ],
)
def test_other_writers_spellings_describe_the_same_model(family, changes):
    expected, found = family.describe(PUBLISHED_20B, METAL), family.describe(changed(changes), METAL)
    assert found.layers == expected.layers
    assert found.vocab_size == expected.vocab_size
    assert found.ignored_fields == ()


def test_unknown_harmless_fields_are_listed(family):
    config = changed({"my_note": "hello", "auto_map": {"AutoModel": "code.Model"}, "model_file": "x.py"})
    description = family.describe(config, CUDA)
    assert description.ignored_fields == ("auto_map", "model_file", "my_note")
    assert description.notes == ("auto_map, model_file: code from a checkpoint is never run",)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"head_dim": ...}, "head_dim"),
        ({"head_dim": 63}, "head_dim"),
        ({"hidden_size": "2880"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"num_experts_per_tok": 33, "experts_per_token": 33}, "num_experts_per_tok"),
        ({"experts_per_token": 8}, "experts_per_token"),
        ({"num_experts": 64}, "num_experts"),
        ({"initial_context_length": 8192}, "initial_context_length"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        ({"layer_types": 24}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": ...}, "sliding_window"),
        ({"attention_bias": False}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_shared_experts": 1}, "num_shared_experts"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "torch_dtype"),
        ({"rope_scaling": ..., "rope_theta": ...}, "rope_parameters"),
        ({"rope_scaling": None}, "rope_parameters"),
        ({"rope_scaling": 32}, "rope_scaling"),
        ({"rope_theta": ...}, "rope_theta"),
        ({"rope_scaling.rope_theta": 10000}, "rope_theta"),
        ({"rope_parameters": YARN | {"factor": 16.0}}, "rope_scaling.factor"),
        ({"rope_scaling.factor": ...}, "rope_scaling.factor"),
        ({"rope_scaling.factor": "32"}, "rope_scaling.factor"),
        ({"rope_scaling.beta_fast": -1}, "rope_scaling.beta_fast"),
        ({"rope_scaling.rope_type": "longrope"}, "rope_scaling.rope_type"),
        ({"rope_scaling.rope_type": ...}, "rope_scaling.rope_type"),
        ({"rope_scaling.type": "linear"}, "rope_scaling.type"),
        ({"rope_scaling.truncate": "no"}, "rope_scaling.truncate"),
        ({"rope_scaling.partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor"),
        ({"rope_scaling.new_kind_of_scaling": 2}, "rope_scaling.new_kind_of_scaling"),
        (
            {"rope_scaling.original_max_position_embeddings": ..., "initial_context_length": ...},
            "rope_scaling.original_max_position_embeddings",
        ),
        ({"quantization_config.quant_method": "gptq"}, "quantization_config.quant_method"),
        ({"quantization_config": 4}, "quantization_config"),
        ({"quantization": PLAIN_MLX}, "quantization_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": PLAIN_MLX | {"mode": "nvfp4"}}, "quantization_config"),
        ({"quantization_config": PLAIN_MLX | {"bits": 7}}, "quantization_config"),
        ({"quantization_config": PLAIN_MLX | {"lm_head": 8}}, "quantization_config.lm_head"),
        (
            {"quantization_config": PLAIN_MLX | {"lm_head": {"bits": 8, "group_size": 64, "x": 1}}},
            "quantization_config.lm_head.x",
        ),
        ({"quantize_activations": True}, "quantize_activations"),
    ],
)
def test_what_changes_the_computation_is_refused_by_name(family, changes, field):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        family.describe(changed(changes), CPU)
    assert caught.value.message.startswith(f"config.json: {field}: ")
    assert "\n" not in caught.value.message


def test_every_golden_checkpoint_has_the_rate_of_its_config(family, checkpoints, load, random_checkpoint):
    for layout in checkpoints.LAYOUTS:
        loaded = load(random_checkpoint("yarn", layout))
        described = family.describe(checkpoints.config("yarn", layout), CPU)
        assert loaded.description.kv_bytes_per_token == described.kv_bytes_per_token > 0
        assert loaded.description.kv_bytes(100) == described.kv_bytes(100)
