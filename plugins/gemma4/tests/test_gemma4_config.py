"""``describe``: every layout and every published size, and what it refuses."""

import copy

import pytest

from darkbloom_core.contracts import Device
from darkbloom_core.errors import UnsupportedCheckpoint

CPU, METAL, CUDA = Device("cpu"), Device("metal"), Device("cuda")
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}


def published(text, **whole):
    """A config as the publisher writes it, with what all sizes have in common."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        **text,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0",
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
        **whole,
    }


def every(count, of):
    """``of - 1`` sliding layers, then a full one, and so on."""
    return [FULL if (index + 1) % of == 0 else SLIDING for index in range(count)]


E2B = published(
    {
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": every(35, 5),
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
    },
    audio_config={"model_type": "gemma4_audio"},
)
E4B = published(
    {
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "layer_types": every(42, 6),
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
    },
    audio_config={"model_type": "gemma4_audio"},
)
DENSE_12B = published(
    {
        "attention_k_eq_v": True,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": every(48, 6),
        "max_position_embeddings": 262144,
        "model_type": "gemma4_unified_text",
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    model_type="gemma4_unified",
    architectures=["Gemma4UnifiedForConditionalGeneration"],
)
DENSE_31B = published(
    {
        "attention_k_eq_v": True,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "layer_types": every(60, 6),
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    }
)
MOE_26B = published(
    {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": every(30, 6),
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "top_k_experts": 8,
    }
)
SIZES = {"E2B": E2B, "E4B": E4B, "12B": DENSE_12B, "31B": DENSE_31B, "26B-A4B": MOE_26B}


def changed(config, text=None, **whole):
    """A copy with other fields; ``...`` removes one."""
    config = copy.deepcopy(config)
    for table, fields in ((config.get("text_config", config), text or {}), (config, whole)):
        for name, value in fields.items():
            if value is ...:
                table.pop(name, None)
            else:
                table[name] = value
    return config


@pytest.mark.parametrize(
    ("size", "bytes_per_token", "bytes_of_windows"),
    [
        # K and V of 5 full layers of 2 heads x 512; of 25 sliding ones of 8 heads x 256 and 1024 tokens.
        ("26B-A4B", 20_480, 25 * 2 * 8 * 256 * 2 * 1024),
        ("31B", 10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2 * 1024),
        ("12B", 8 * 2 * 1 * 512 * 2, 40 * 2 * 8 * 256 * 2 * 1024),
        # 15 of 35 layers keep K and V, 3 of them full; 24 of 42, 4 of them full.
        ("E2B", 3 * 2 * 1 * 512 * 2, 12 * 2 * 1 * 256 * 2 * 512),
        ("E4B", 4 * 2 * 2 * 512 * 2, 20 * 2 * 2 * 256 * 2 * 512),
    ],
)
def test_kv_of_the_published_sizes(family, size, bytes_per_token, bytes_of_windows):
    description = family.describe(SIZES[size], METAL)
    assert description.kv_bytes_per_token == bytes_per_token
    assert description.kv_bytes(100_000) == 100_000 * bytes_per_token + bytes_of_windows
    assert description.kv_dtypes == {"bfloat16"}


@pytest.mark.parametrize(
    ("tokens", "size_bytes"),
    [
        (1, 225_280),
        (128, 28_835_840),
        (1024, 230_686_720),
        (4096, 293_601_280),
        (131_072, 2_894_069_760),
    ],
)
def test_a_sequence_takes_the_known_bytes_at_every_length(family, tokens, size_bytes):
    assert family.describe(SIZES["26B-A4B"], METAL).kv_bytes(tokens) == size_bytes


@pytest.mark.parametrize("size", SIZES)
def test_a_published_config_says_what_the_model_is(family, size):
    config = SIZES[size]
    text = config["text_config"]
    description = family.describe(config, METAL)
    assert description.family == "gemma4"
    assert description.model_type == config["model_type"]
    assert description.context_tokens == text["max_position_embeddings"]
    assert description.vocab_size == 262144
    assert description.hidden_size == text["hidden_size"]
    assert description.modalities == {"text", "image", "video"}
    windows = [text["sliding_window"] if kind == SLIDING else None for kind in text["layer_types"]]
    assert [layer.window for layer in description.layers] == windows
    assert {layer.k_dim for layer in description.layers if layer.window} == {256}
    assert {layer.k_dim for layer in description.layers if not layer.window} == {512}
    assert {layer.scale for layer in description.layers} == {1.0}
    assert {layer.softcap for layer in description.layers} == {None}
    assert set(description.ignored_fields) <= {"dtype", "vision_soft_tokens_per_image"}


@pytest.mark.parametrize(("size", "spans"), [("26B-A4B", "window"), ("31B", "window"), ("E2B", "causal")])
def test_pictures_see_both_ways_in_the_window_of_sliding_layers_only(family, size, spans):
    layers = family.describe(SIZES[size], METAL).layers
    assert {layer.spans for layer in layers if layer.window} == {spans}
    assert {layer.spans for layer in layers if not layer.window} == {"causal"}


def test_later_layers_borrow_from_the_last_of_their_kind_that_keeps_kv(family):
    layers = family.describe(E2B, METAL).layers
    assert all(layer.source is None for layer in layers[:15])
    for layer in layers[15:]:
        assert layer.source == (13 if layer.window else 14)
        assert layer.parts == ()
    sources = {layer.source for layer in family.describe(E4B, METAL).layers}
    assert sources == {None, 22, 23}


def test_unquantised_experts_double_kv_on_the_cpu_only(family):
    on_cpu = family.describe(MOE_26B, CPU)
    assert on_cpu.kv_bytes_per_token == 2 * 20_480
    assert on_cpu.memory_per_disk_byte == 2.0
    for device in (METAL, CUDA):
        assert family.describe(MOE_26B, device).memory_per_disk_byte == 1.0
    assert family.describe(DENSE_31B, CPU).kv_dtypes == {"bfloat16"}


def test_quantised_experts_keep_the_stored_dtype_on_the_cpu(family):
    quantized = changed(MOE_26B, quantization={"group_size": 64, "bits": 4, "mode": "affine"})
    assert family.describe(quantized, CPU).kv_bytes_per_token == 20_480
    one = "language_model.model.layers.7.experts.switch_glu.down_proj"
    partly = changed(MOE_26B, quantization={"group_size": 64, "bits": 4, one: False})
    assert family.describe(partly, CPU).kv_bytes_per_token == 2 * 20_480
    # 704, the width of an expert, holds no whole number of groups of 128.
    coarse = changed(MOE_26B, quantization={"group_size": 128, "bits": 4})
    assert family.describe(coarse, CPU).kv_bytes_per_token == 2 * 20_480


def layouts_of_26b():
    text = MOE_26B["text_config"]
    overrides = {
        str(index).zfill(2): {"head_dim": 512, "num_key_value_heads": 2} for index in range(5, 30, 6)
    }
    gone = {"global_head_dim": ..., "num_global_key_value_heads": ...}
    flat = {
        "rope_parameters": ...,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    router = {"language_model.model.layers.0.router.proj": {"group_size": 64, "bits": 8}}
    return {
        "per_layer_config": changed(MOE_26B, {"per_layer_config": overrides, **gone}),
        "per_layer_config and global_head_dim": changed(MOE_26B, {"per_layer_config": overrides}),
        "text only": {**text, "architectures": ["Gemma4ForCausalLM"], "transformers_version": "5.24.0"},
        "flat rope": changed(MOE_26B, flat),
        "rope_scaling by layer type": changed(MOE_26B, {"rope_parameters": ..., "rope_scaling": ROPE}),
        "no rope at all": changed(MOE_26B, {"rope_parameters": ...}),
        "no layer types": changed(MOE_26B, {"layer_types": ...}),
        "torch_dtype": changed(MOE_26B, {"dtype": ..., "torch_dtype": "bfloat16"}, dtype=...),
        "older names": changed(
            MOE_26B,
            {
                "moe_intermediate_size": ...,
                "expert_intermediate_size": 704,
                "top_k_experts": ...,
                "num_experts_per_tok": 8,
            },
        ),
        "MLX quantization": changed(
            MOE_26B, quantization=quantization | router, quantization_config=quantization | router
        ),
        "quantization_config alone": changed(MOE_26B, quantization_config=quantization),
    }


@pytest.mark.parametrize("layout", layouts_of_26b())
def test_every_layout_describes_the_same_model(family, layout):
    ours = family.describe(layouts_of_26b()[layout], METAL)
    published = family.describe(MOE_26B, METAL)
    assert ours.layers == published.layers
    assert ours.config["model"].full_rotary == published.config["model"].full_rotary
    assert ours.config["model"].sliding_rotary == published.config["model"].sliding_rotary
    assert ours.config["model"].experts == published.config["model"].experts


REFUSED = [
    ("text_config.hidden_size", {"hidden_size": ...}),
    ("text_config.hidden_size", {"hidden_size": "large"}),
    ("text_config.hidden_size", {"hidden_size": True}),
    ("text_config.num_attention_heads", {"num_attention_heads": 0}),
    ("text_config.num_attention_heads", {"num_attention_heads": 12}),
    ("text_config.head_dim", {"head_dim": ...}),
    ("text_config.head_dim", {"head_dim": 255}),
    ("text_config.layer_types", {"layer_types": [SLIDING, FULL]}),
    ("text_config.layer_types", {"layer_types": ["linear_attention"] * 30}),
    ("text_config.layer_types", {"layer_types": ..., "sliding_window_pattern": 5}),
    ("text_config.hidden_activation", {"hidden_activation": "silu"}),
    ("text_config.attention_bias", {"attention_bias": True}),
    ("text_config.use_bidirectional_attention", {"use_bidirectional_attention": "all"}),
    ("text_config.num_kv_shared_layers", {"num_kv_shared_layers": 30}),
    ("text_config.num_kv_shared_layers", {"num_kv_shared_layers": 26}),
    ("text_config.num_experts", {"num_experts": None}),
    ("text_config.top_k_experts", {"top_k_experts": 129}),
    ("text_config.expert_intermediate_size", {"expert_intermediate_size": 700}),
    ("text_config.dtype", {"dtype": "float8_e4m3fn"}),
    ("text_config.rms_norm_eps", {"rms_norm_eps": 0}),
    ("text_config.final_logit_softcapping", {"final_logit_softcapping": -1}),
    ("text_config.attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    ("text_config.query_pre_attn_scalar", {"query_pre_attn_scalar": 256}),
    ("text_config.model_type", {"model_type": "gemma3_text"}),
    ("text_config.tie_word_embeddings", {"tie_word_embeddings": False}),
    ("text_config.per_layer_config.30", {"per_layer_config": {"30": {"head_dim": 512}}}),
    ("text_config.per_layer_config.5.sliding_window", {"per_layer_config": {"5": {"sliding_window": 2}}}),
    ("text_config.per_layer_config.5", {"per_layer_config": {"5": {"head_dim": 256}}}),
    ("text_config.rope_theta", {"rope_theta": 5000.0}),
    ("text_config.rope_scaling", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("text_config.partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    (
        "text_config.rope_parameters.full_attention.rope_type",
        {"rope_parameters": {**ROPE, FULL: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8}}},
    ),
    (
        "text_config.rope_parameters.full_attention.rope_type",
        {"rope_parameters": {**ROPE, FULL: {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}},
    ),
    (
        "text_config.rope_parameters.full_attention.rope_theta",
        {"rope_parameters": {**ROPE, FULL: {"rope_type": "proportional"}}},
    ),
    (
        "text_config.rope_parameters.sliding_attention.mrope_section",
        {"rope_parameters": {**ROPE, SLIDING: {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}},
    ),
    ("text_config.rope_parameters.other", {"rope_parameters": {**ROPE, "other": {}}}),
]


@pytest.mark.parametrize(("field", "text"), REFUSED)
def test_a_field_that_would_change_the_numbers_is_refused_by_name(family, field, text):
    with pytest.raises(UnsupportedCheckpoint) as refusal:
        family.describe(changed(MOE_26B, text), METAL)
    assert f"config.json: {field} " in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("field", "whole"),
    [
        ("text_config", {"text_config": None}),
        ("text_config", {"text_config": 7}),
        ("model_type", {"model_type": "gemma5"}),
        ("vocab_size", {"vocab_size": 99}),
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "modelopt"}}),
        ("quantization.mode", {"quantization": {"bits": 4, "group_size": 64, "mode": "ternary"}}),
        (
            "quantization_config.bits",
            {"quantization": {"bits": 4}, "quantization_config": {"bits": 8}},
        ),
    ],
)
def test_a_field_of_the_whole_model_is_refused_by_name(family, field, whole):
    with pytest.raises(UnsupportedCheckpoint, match=f"config.json: {field} "):
        family.describe(changed(MOE_26B, None, **whole), METAL)


def test_a_borrower_must_have_the_heads_of_its_source(family):
    overrides = {str(index): {"head_dim": 512} for index in range(4, 34, 5)} | {"34": {"head_dim": 128}}
    with pytest.raises(UnsupportedCheckpoint, match=r"per_layer_config\.34 has other heads than layer 14"):
        family.describe(changed(E2B, {"per_layer_config": overrides, "global_head_dim": ...}), METAL)


def test_harmless_unknown_fields_are_listed(family):
    config = changed(MOE_26B, {"shiny": None, "off": False}, unsloth_fixed=True, anything={"a": 1})
    ignored = family.describe(config, METAL).ignored_fields
    assert {"text_config.shiny", "text_config.off", "unsloth_fixed", "anything"} <= set(ignored)


def test_code_that_a_checkpoint_brings_is_noted_as_never_run(family):
    config = changed(MOE_26B, None, auto_map={"AutoModel": "evil.Model"}, model_file="evil.py")
    assert any("never run" in note for note in family.describe(config, METAL).notes)


def test_the_last_layer_attends_in_full_as_in_the_reference(family):
    types = [*every(29, 6), SLIDING]
    description = family.describe(changed(MOE_26B, {"layer_types": types}), METAL)
    assert description.layers[-1].window is None
    assert any("last layer" in note for note in description.notes)


def test_describing_changes_nothing_in_the_config(family):
    before = copy.deepcopy(MOE_26B)
    family.describe(MOE_26B, METAL)
    assert before == MOE_26B
