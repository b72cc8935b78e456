"""What a Qwen3 ``config.json`` says. Pure: values in, values out, nothing else is read.

Two layouts are in the wild. The publisher's has ``rope_theta`` at the top; what current
``transformers`` writes has it inside ``rope_parameters``. Conversions of the MLX community
are the first of these with a table ``quantization``.

The rule for every field: one that changes the numbers is read or refused, never skipped. A
model that loads and then answers subtly wrong is the worst thing a family can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from darkbloom_core.contracts import ELEMENT_BYTES, Dtype, LayerKind, ModelDescription
from darkbloom_core.errors import UnsupportedCheckpoint

# Fields that would change the computation, and the only value for which we know how.
_ONLY: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}

# Fields that we read.
_READ = frozenset(
    {
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "layer_types"),
        *("tie_word_embeddings", "dtype", "torch_dtype", "quantization", "quantization_config"),
    }
)

# Fields that leave the logits alone. What is in none of these lists is shown to people as ignored.
_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "architectures", "attention_dropout", "bos_token_id", "eos_token_id"),
        *("initializer_range", "max_window_layers", "pad_token_id", "sliding_window"),
        *("transformers_version", "use_cache"),
    }
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How MLX stores matrices as small integers: ``bits`` each, one scale and bias per ``group_size``."""

    bits: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """The fields that the computation needs. ``dtype`` is what weights, activations and KV are kept in."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    dtype: Dtype
    quantization: Quantization | None
    overrides: Mapping[str, Quantization | None]
    """Modules that are quantised otherwise than ``quantization`` says, or (None) not at all."""

    def quantization_of(self, module: str) -> Quantization | None:
        """How ``module`` (such as ``model.layers.0.mlp.up_proj``) is quantised, if its tensors are."""
        return self.overrides.get(module, self.quantization)


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """What the core wants to know. Everything about memory follows from ``layers``."""
    read = read_config(config)
    # All layers of this family are alike: full attention, K and V of every token kept.
    layer = LayerKind(
        q_heads=read.q_heads,
        kv_heads=read.kv_heads,
        k_dim=read.head_dim,
        v_dim=read.head_dim,
        scale=read.head_dim**-0.5,
        dtype=read.dtype,
    )
    return ModelDescription(
        family="qwen3",
        model_type=config["model_type"],
        context_tokens=read.context_tokens,
        vocab_size=read.vocab_size,
        hidden_size=read.hidden_size,
        layers=(layer,) * read.layers,
        ignored_fields=tuple(sorted(config.keys() - _READ - _WITHOUT_EFFECT - _ONLY.keys())),
        config=config,  # ``load`` reads it again, which costs nothing
    )


def read_config(config: Mapping[str, Any]) -> Qwen3Config:
    """The typed fields. Raises ``UnsupportedCheckpoint`` naming the field that is missing or not understood."""
    for name, value in _ONLY.items():
        if config.get(name, value) != value:
            _refuse(name, f"is {config[name]!r}, but only {value!r} is supported")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        _refuse("layer_types", "names something other than full_attention, which is all that is supported")
    quantization, overrides = _read_quantization(config)
    read = Qwen3Config(
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=_whole(config, "hidden_size"),
        mlp_size=_whole(config, "intermediate_size"),
        layers=_whole(config, "num_hidden_layers"),
        q_heads=_whole(config, "num_attention_heads"),
        kv_heads=_whole(config, "num_key_value_heads"),
        head_dim=_whole(config, "head_dim"),
        context_tokens=_whole(config, "max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps"),
        rope_theta=_read_rope_theta(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_read_dtype(config),
        quantization=quantization,
        overrides=overrides,
    )
    if read.q_heads % read.kv_heads:
        _refuse("num_attention_heads", f"is {read.q_heads}, no multiple of {read.kv_heads} KV heads")
    return read


def _read_rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies. Stretched ones (YaRN and the like) are refused, not approximated."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        table = config.get(name) or {}
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            _refuse(name, f"is of type {kind!r}, but only 'default' is supported")
        found += [_number(table, "rope_theta")] if "rope_theta" in table else []
    found += [_number(config, "rope_theta")] if "rope_theta" in config else []
    if not found:
        _refuse("rope_theta", "is missing")
    if len(set(found)) > 1:
        _refuse("rope_theta", f"is given twice, as {found[0]:g} and as {found[1]:g}")
    return found[0]


def _read_dtype(config: Mapping[str, Any]) -> Dtype:
    value = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if value not in ELEMENT_BYTES:
        _refuse("dtype", f"is {value!r}, but only {', '.join(ELEMENT_BYTES)} are supported")
    dtype: Dtype = value
    return dtype


def _read_quantization(
    config: Mapping[str, Any],
) -> tuple[Quantization | None, dict[str, Quantization | None]]:
    """The table that MLX conversions write: a default, and modules that differ from it."""
    table = config.get("quantization") or config.get("quantization_config")
    if not table:
        return None, {}
    if "quant_method" in table or table.get("mode", "affine") != "affine":
        kind = table.get("quant_method", table.get("mode"))
        _refuse("quantization_config", f"is of kind {kind!r}, but only MLX's own 'affine' is supported")
    default = Quantization(_whole(table, "bits"), _whole(table, "group_size"))
    overrides: dict[str, Quantization | None] = {}
    for module, value in table.items():
        if value is False:
            overrides[module] = None
        elif isinstance(value, Mapping):
            if value.get("mode", "affine") != "affine":
                _refuse(
                    f"quantization.{module}", f"is of mode {value['mode']!r}, but only 'affine' is supported"
                )
            overrides[module] = Quantization(_whole(value, "bits"), _whole(value, "group_size"))
    return default, overrides


def _whole(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(name, f"must be a whole number above 0, not {value!r}")
    return value


def _number(table: Mapping[str, Any], name: str) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        _refuse(name, f"must be a number above 0, not {value!r}")
    return float(value)


def _refuse(name: str, reason: str) -> NoReturn:
    raise UnsupportedCheckpoint(f"config.json: {name} {reason}")
