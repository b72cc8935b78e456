"""What a Gemma 4 ``config.json`` says, in the publisher's layout, that of ``transformers`` and that of MLX conversions.

Pure: nothing but the config is read. Defaults are those of ``transformers``. A field that
changes the computation in a way that this plugin does not know is an
``UnsupportedCheckpoint`` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from darkbloom_core.contracts import ELEMENT_BYTES, Device, Dtype, LayerKind, ModelDescription
from darkbloom_gemma4._fields import Fields
from darkbloom_gemma4._quantization import Quantization, read_quantization
from darkbloom_gemma4._rotary import FULL, SLIDING, Rotary, read_rotary
from darkbloom_gemma4._vision_config import VisionConfig, read_vision

FAMILY = "gemma4"
MULTIMODAL_TYPES = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
TEXT_TYPES = frozenset(MULTIMODAL_TYPES.values())
MODEL_TYPES = TEXT_TYPES | MULTIMODAL_TYPES.keys()

_LAYERS_TO_A_FULL_ONE = 6

# Fields of every transformers config, and of tools that write it, that leave the logits alone.
_HARMLESS = re.compile(
    r"_.*|.*_token_id|.*_token_index|.*_token_ids|output_.*|unsloth_.*|num_beams|num_beam_groups|num_return_sequences"
    r"|architectures|attention_dropout|attn_implementation|auto_map|bad_words_ids|chunk_size_feed_forward"
    r"|cross_attention_hidden_size|diversity_penalty|do_sample|early_stopping|exponential_decay_length_penalty"
    r"|finetuning_task|id2label|initializer_range|is_decoder|is_encoder_decoder|label2id|length_penalty"
    r"|max_length|min_length|model_file|model_type|no_repeat_ngram_size|encoder_no_repeat_ngram_size|prefix"
    r"|problem_type|pruned_heads|remove_invalid_values|repetition_penalty|return_dict.*|suppress_tokens"
    r"|begin_suppress_tokens|task_specific_params|temperature|tf_legacy_loss|tie_encoder_decoder"
    r"|tokenizer_class|top_k|top_p|torchscript|transformers_version|typical_p|use_bfloat16|use_cache"
)
# Named in no list for a person: every checkpoint has them.
_EXPECTED = re.compile(
    r"_.*|.*_token_id|.*_token_index|architectures|attention_dropout|initializer_range|transformers_version|use_cache"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer. ``source`` is the layer whose K and V it borrows; ``mlp_size`` the width of its dense MLP."""

    sliding: bool
    head_dim: int
    kv_heads: int
    k_equals_v: bool
    source: int | None
    mlp_size: int


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    count: int
    chosen: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """The text model, and the tower beside it. ``dtype`` is what they compute and keep KV in on that device."""

    vocab_size: int
    hidden_size: int
    heads: int
    context_tokens: int
    window: int
    layers: tuple[LayerConfig, ...]
    sliding_rotary: Rotary
    full_rotary: Rotary
    norm_epsilon: float
    softcap: float | None
    tied: bool
    experts: ExpertsConfig | None
    per_layer_size: int
    per_layer_vocab_size: int
    pad_token: int
    pictures_see_both_ways: bool
    quantization: Quantization | None
    stored_dtype: Dtype
    dtype: Dtype
    vision: VisionConfig | None

    def experts_are_quantized(self) -> bool:
        """Whether every expert matrix of the checkpoint is quantised, as the config tells it."""
        return self.experts is not None and experts_are_quantized(
            self.quantization, self.experts, self.hidden_size, len(self.layers)
        )


def describe(config: Mapping[str, Any], device: Device) -> ModelDescription:
    """See ``ModelFamily.describe``."""
    outer = Fields(config)
    model_type = str(outer.get("model_type")).strip().lower()
    notes: list[str] = []
    if model_type in MULTIMODAL_TYPES:
        text = outer.table("text_config") or outer.refuse("text_config", "is missing")
        inner_type = text.get("model_type") or MULTIMODAL_TYPES[model_type]
        if inner_type not in TEXT_TYPES:
            text.refuse("model_type", f"is {inner_type!r}, which this plugin does not know")
        if outer.get("audio_config") is not None:
            notes.append("sound is not supported yet: text, pictures and videos only")
    elif model_type in TEXT_TYPES:
        text, inner_type = outer, model_type
    else:
        outer.refuse("model_type", f"is {model_type!r}, which this plugin does not know")
    if outer.get("auto_map") is not None or outer.get("model_file") is not None:
        notes.append("the checkpoint brings code of its own, which is never run")

    understood = _read(
        outer, text, unified=inner_type.startswith("gemma4_unified"), device=device, notes=notes
    )
    ignored = _left_over(text, strict=True)
    if outer is not text:
        ignored += _left_over(outer, strict=False)
    return ModelDescription(
        family=FAMILY,
        model_type=model_type,
        context_tokens=understood.context_tokens,
        vocab_size=understood.vocab_size,
        hidden_size=understood.hidden_size,
        layers=tuple(_kind(understood, layer) for layer in understood.layers),
        modalities=frozenset({"text"} if understood.vision is None else {"text", "image", "video"}),
        memory_per_disk_byte=ELEMENT_BYTES[understood.dtype] / ELEMENT_BYTES[understood.stored_dtype],
        ignored_fields=tuple(ignored),
        notes=tuple(notes),
        config={"model": understood},
    )


def _kind(config: Gemma4Config, layer: LayerConfig) -> LayerKind:
    return LayerKind(
        q_heads=config.heads,
        kv_heads=layer.kv_heads,
        k_dim=layer.head_dim,
        v_dim=layer.head_dim,
        scale=1.0,
        window=config.window if layer.sliding else None,
        source=layer.source,
        spans="window" if layer.sliding and config.pictures_see_both_ways else "causal",
        dtype=config.dtype,
    )


def _read(outer: Fields, text: Fields, *, unified: bool, device: Device, notes: list[str]) -> Gemma4Config:
    hidden_size = text.integer("hidden_size")
    vocab_size = text.integer("vocab_size")
    if outer is not text and outer.get("vocab_size") not in (None, vocab_size):
        outer.refuse("vocab_size", f"contradicts {text.place}vocab_size")
    layer_types = _layer_types(text, notes)
    _require(text, "hidden_activation", "gelu_pytorch_tanh")
    _require(text, "hidden_act", "gelu_pytorch_tanh")
    _require(text, "attention_bias", False)
    bidirectional = text.values.get("use_bidirectional_attention", "vision" if unified else None)
    text.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):
        text.refuse("use_bidirectional_attention", f"is {bidirectional!r}: only null and 'vision' are known")
    experts = _experts(text)
    quantization = read_quantization(outer, text)
    stored = _stored_dtype(outer, text)
    quantized = experts is not None and experts_are_quantized(
        quantization, experts, hidden_size, len(layer_types)
    )
    # MLX's CPU backend multiplies gathered, unquantised matrices in float32 only.
    dtype: Dtype = "float32" if device.kind == "cpu" and experts is not None and not quantized else stored
    sliding_rotary, full_rotary = read_rotary(text)
    return Gemma4Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        heads=text.integer("num_attention_heads"),
        context_tokens=text.integer("max_position_embeddings", 262_144 if unified else 131_072),
        window=text.integer("sliding_window", 1024 if unified else 512),
        layers=_layers(text, layer_types),
        sliding_rotary=sliding_rotary,
        full_rotary=full_rotary,
        norm_epsilon=text.number("rms_norm_eps", 1e-6),
        softcap=text.optional_number("final_logit_softcapping"),
        tied=_tied(outer, text),
        experts=experts,
        per_layer_size=text.integer("hidden_size_per_layer_input", 0 if unified else 256, least=0),
        per_layer_vocab_size=text.integer("vocab_size_per_layer_input", vocab_size),
        pad_token=text.integer("pad_token_id", 0, least=0),
        pictures_see_both_ways=bidirectional == "vision",
        quantization=quantization,
        stored_dtype=stored,
        dtype=dtype,
        vision=None if outer is text else read_vision(outer),
    )


def _layer_types(text: Fields, notes: list[str]) -> list[str]:
    count = text.integer("num_hidden_layers")
    types = text.get("layer_types")
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if types is None:
        if pattern not in (None, _LAYERS_TO_A_FULL_ONE):
            text.refuse("layer_types", f"is missing, and the pattern {pattern!r} has more than one reading")
        types = [SLIDING if (index + 1) % _LAYERS_TO_A_FULL_ONE else FULL for index in range(count)]
    if not isinstance(types, list) or not all(each in (SLIDING, FULL) for each in types):
        text.refuse("layer_types", f"may hold {SLIDING!r} and {FULL!r} only, not {types!r}")
    if len(types) != count:
        text.refuse("layer_types", f"has {len(types)} entries, but num_hidden_layers is {count}")
    if types[-1] != FULL:
        notes.append("the last layer attends in full, whatever layer_types says, as in the reference")
        types = [*types[:-1], FULL]
    return types


def _layers(text: Fields, types: list[str]) -> tuple[LayerConfig, ...]:
    heads = text.integer("num_attention_heads")
    k_equals_v = text.boolean("attention_k_eq_v", False)
    shapes = _head_shapes(text, types, k_equals_v)
    mlp_size = text.integer("intermediate_size")
    double_wide = text.boolean("use_double_wide_mlp", False)
    shared = text.integer("num_kv_shared_layers", 0, least=0)
    owners = len(types) - shared
    layers = []
    for index, (kind, (head_dim, kv_heads)) in enumerate(zip(types, shapes, strict=True)):
        source = None
        if index >= owners:
            of_my_kind = [other for other in range(max(owners, 0)) if types[other] == kind]
            if not of_my_kind:
                text.refuse("num_kv_shared_layers", f"leaves no {kind} layer that keeps K and V")
            source = of_my_kind[-1]
            if shapes[source] != (head_dim, kv_heads):
                text.refuse(
                    f"per_layer_config.{index}",
                    f"has other heads than layer {source}, whose K and V it borrows",
                )
        if heads % kv_heads:
            text.refuse("num_attention_heads", f"({heads}) is not a multiple of {kv_heads} KV heads")
        if head_dim % 2:
            text.refuse("head_dim", f"must be even, not {head_dim}")
        layers.append(
            LayerConfig(
                sliding=kind == SLIDING,
                head_dim=head_dim,
                kv_heads=kv_heads,
                k_equals_v=k_equals_v and kind == FULL,
                source=source,
                mlp_size=mlp_size * (2 if double_wide and source is not None else 1),
            )
        )
    return tuple(layers)


def _head_shapes(text: Fields, types: list[str], k_equals_v: bool) -> list[tuple[int, int]]:
    """(head_dim, kv_heads) of each layer, from ``per_layer_config`` or else from the ``global_`` fields."""
    base = (text.integer("head_dim"), text.integer("num_key_value_heads"))
    of_full = (
        text.integer("global_head_dim", 512),
        text.integer("num_global_key_value_heads", base[1]) if k_equals_v else base[1],
    )
    text.get("num_global_key_value_heads")
    per_layer = text.table("per_layer_config")
    if per_layer is None:
        return [base if kind == SLIDING else of_full for kind in types]
    shapes = [base] * len(types)
    for name in per_layer.values:
        if not name.isdecimal() or int(name) >= len(types):
            per_layer.refuse(name, f"names no layer of {len(types)}")
        override = per_layer.table(name)
        if override is None:
            continue
        shapes[int(name)] = (
            override.integer("head_dim", base[0]),
            override.integer("num_key_value_heads", base[1]),
        )
        for unknown in override.not_asked():
            override.refuse(unknown, "is an override that this plugin does not know")
    if text.get("global_head_dim") is not None:
        for index, kind in enumerate(types):
            if kind == FULL and shapes[index] != of_full:
                text.refuse(
                    f"per_layer_config.{index}", "contradicts global_head_dim or num_global_key_value_heads"
                )
    return shapes


def _experts(text: Fields) -> ExpertsConfig | None:
    size = _same(text, "moe_intermediate_size", "expert_intermediate_size")
    chosen = _same(text, "top_k_experts", "num_experts_per_tok")
    if not text.boolean("enable_moe_block", False):
        text.get("num_experts")
        return None
    experts = ExpertsConfig(text.integer("num_experts"), text.integer(chosen), text.integer(size))
    if experts.chosen > experts.count:
        text.refuse(chosen, f"is {experts.chosen}, but there are {experts.count} experts")
    return experts


def _same(text: Fields, name: str, older_name: str) -> str:
    """Which of two names of one field to read; both may be there if they agree."""
    value, older = text.get(name), text.get(older_name)
    if value is not None and older is not None and value != older:
        text.refuse(older_name, f"contradicts {name}")
    return older_name if value is None and older is not None else name


def experts_are_quantized(
    quantization: Quantization | None, experts: ExpertsConfig, hidden_size: int, layers: int
) -> bool:
    """Whether every expert matrix is quantised, as the config tells it. A width must hold whole groups."""
    if quantization is None:
        return False
    widths = {"gate_proj": hidden_size, "up_proj": hidden_size, "down_proj": experts.size}
    return all(
        (scheme := quantization.of(f"layers.{layer}.experts.switch_glu.{name}")) is not None
        and width % scheme.group_size == 0
        for layer in range(layers)
        for name, width in widths.items()
    )


def _stored_dtype(outer: Fields, text: Fields) -> Dtype:
    for fields in (text, outer):
        for name in ("dtype", "torch_dtype"):
            value = fields.get(name)
            if value is None:
                continue
            if value not in get_args(Dtype):
                fields.refuse(name, f"is {value!r}: only {', '.join(get_args(Dtype))} are known")
            return value  # type: ignore[no-any-return]  # checked above
    return "bfloat16"


def _tied(outer: Fields, text: Fields) -> bool:
    values = {
        fields.boolean("tie_word_embeddings", True)
        for fields in (outer, text)
        if fields.get("tie_word_embeddings") is not None
    }
    if len(values) > 1:
        text.refuse("tie_word_embeddings", "contradicts the tie_word_embeddings of the whole model")
    return values != {False}


def _require(fields: Fields, name: str, expected: object) -> None:
    value = fields.get(name)
    if value is not None and value != expected:
        fields.refuse(name, f"is {value!r}: only {expected!r} is known")


def _left_over(fields: Fields, *, strict: bool) -> list[str]:
    """Names of fields that nothing reads. With ``strict``, one that may change the numbers is refused."""
    names = []
    for name in fields.not_asked():
        harmless = _HARMLESS.fullmatch(name) is not None or fields.values[name] in (
            None,
            False,
            0,
            "",
            [],
            {},
        )
        if strict and not harmless:
            fields.refuse(name, "is a field that this plugin does not know; it may change what is computed")
        if _EXPECTED.fullmatch(name) is None:
            names.append(f"{fields.place}{name}")
    return names
