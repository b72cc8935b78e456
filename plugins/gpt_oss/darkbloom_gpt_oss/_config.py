"""What a GPT-OSS ``config.json`` says, in each layout found in the wild.

Pure. A field that changes the computation is understood, or the checkpoint is refused by
that field's name; nothing that matters is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from darkbloom_core.contracts import Dtype, LayerKind
from darkbloom_gpt_oss._refuse import refused
from darkbloom_gpt_oss._rope import Rope, parse_rope

_HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "quantization",
        "quantization_config",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    }
)

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (True,),
    "hidden_act": ("silu", None),
    "tie_word_embeddings": (False,),
    "attention_multiplier": (None,),
    "attention_sink": (None, True),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "first_k_dense_replace": (None, 0),
    "logits_scaling": (None, 1.0),
    "mlp_bias": (None, True),
    "n_shared_experts": (None, 0),
    "norm_topk_prob": (None, True),
    "num_shared_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "quantize_activations": (None, False),
    "residual_multiplier": (None, 1.0),
    "routed_scaling_factor": (None, 1.0),
    "scoring_func": (None, "softmax"),
    "shared_expert_intermediate_size": (None, 0),
    "use_qk_norm": (None, False),
    "use_sliding_window": (None, True),
}
"""Fields, GPT-OSS's own and of relatives, that would change the computation unless they have one of these values."""

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Format:
    """How a quantised matrix is packed: ``bits`` a weight, one scale for ``group_size`` of them."""

    mode: Literal["affine", "mxfp4"]
    bits: int
    group_size: int


MXFP4 = Format("mxfp4", 4, 32)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the config says: a default, and what differs from it by module path (None: not quantised)."""

    default: Format
    modules: Mapping[str, Format | None]
    experts_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig:
    """A checkpoint's shape. ``windows`` has one entry per layer, None for full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    windows: tuple[int | None, ...]
    context_tokens: int
    rms_norm_eps: float
    swiglu_alpha: float
    swiglu_limit: float
    rope: Rope
    dtype: Dtype
    quantization: Quantization | None
    ignored_fields: tuple[str, ...]

    def compute_dtype(self, device_kind: str) -> Dtype:
        """What activations and KV are on a device.

        On MLX's CPU backend float32 is several times as fast as bfloat16, and plain
        experts work in no other dtype.
        """
        return "float32" if device_kind == "cpu" else self.dtype

    def packing(self, path: str, inputs: int) -> Format | None:
        """How the matrix ``path`` is quantised, as far as the config tells. No writer packs a row that ends in part of a group."""
        quantization = self.quantization
        if quantization is None or (quantization.experts_only and ".experts." not in path):
            return None
        found = quantization.modules.get(path, quantization.default)
        return found if found is not None and inputs % found.group_size == 0 else None

    def layers(self, device_kind: str) -> tuple[LayerKind, ...]:
        """YaRN's factor on queries and keys is in ``scale``: rotation is linear, so it can wait until then."""
        return tuple(
            LayerKind(
                q_heads=self.q_heads,
                kv_heads=self.kv_heads,
                k_dim=self.head_dim,
                v_dim=self.head_dim,
                scale=self.rope.attention_factor**2 / math.sqrt(self.head_dim),
                window=window,
                sinks=True,
                dtype=self.compute_dtype(device_kind),
            )
            for window in self.windows
        )


def parse_config(config: Mapping[str, Any]) -> GptOssConfig:
    """Read a ``config.json``. Raises ``UnsupportedCheckpoint`` naming the field at fault."""
    fields = _Fields(config)
    layer_count = fields.integer("num_hidden_layers")
    parsed = GptOssConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        q_heads=fields.integer("num_attention_heads"),
        kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        experts=fields.integer("num_local_experts", "num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok", "experts_per_token"),
        windows=_windows(fields, layer_count),
        context_tokens=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        swiglu_alpha=fields.number("swiglu_alpha", default=1.702),
        swiglu_limit=fields.number("swiglu_limit", default=7.0),
        rope=parse_rope(config, fields.integer("head_dim")),
        dtype=_dtype(config),
        quantization=_quantization(config),
        ignored_fields=_ignored(config, fields.used),
    )
    if parsed.q_heads % parsed.kv_heads:
        raise refused("num_key_value_heads", f"{parsed.kv_heads} does not divide num_attention_heads")
    if parsed.head_dim % 2:
        raise refused("head_dim", f"{parsed.head_dim} is odd, so it cannot be rotated in halves")
    if parsed.experts_per_token > parsed.experts:
        raise refused("num_experts_per_tok", f"{parsed.experts_per_token} of {parsed.experts} experts")
    return parsed


class _Fields:
    """Typed access that remembers which fields were asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.used: set[str] = set()

    def integer(self, *names: str) -> int:
        value = self._one(names)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refused(names[0], f"expected a positive whole number, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._one((name,)) if name in self._config or default is None else default
        self.used.add(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise refused(name, f"expected a positive number, found {value!r}")
        return float(value)

    def optional(self, name: str) -> Any:
        self.used.add(name)
        return self._config.get(name)

    def _one(self, names: tuple[str, ...]) -> Any:
        """The value of whichever of ``names`` is there; they are one field under several names."""
        self.used.update(names)
        there = [name for name in names if name in self._config]
        if not there:
            raise refused(names[0], "missing")
        for name in there[1:]:
            if self._config[name] != self._config[there[0]]:
                raise refused(
                    name, f"{self._config[name]!r} contradicts {there[0]} {self._config[there[0]]!r}"
                )
        return self._config[there[0]]


def _windows(fields: _Fields, layer_count: int) -> tuple[int | None, ...]:
    layer_types = fields.optional("layer_types")
    if layer_types is None:
        layer_types = ["full_attention" if index % 2 else "sliding_attention" for index in range(layer_count)]
    if not isinstance(layer_types, list) or len(layer_types) != layer_count:
        raise refused("layer_types", f"expected a list of num_hidden_layers = {layer_count} entries")
    if unknown := set(map(str, layer_types)) - {"sliding_attention", "full_attention"}:
        raise refused("layer_types", f"unknown attention {min(unknown)!r}")
    window = fields.integer("sliding_window") if "sliding_attention" in layer_types else None
    fields.used.add("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(config: Mapping[str, Any]) -> Dtype:
    named = {
        str(config[name]).removeprefix("torch.") for name in ("dtype", "torch_dtype") if config.get(name)
    }
    if len(named) > 1:
        raise refused("torch_dtype", f"{config['torch_dtype']!r} contradicts dtype {config['dtype']!r}")
    dtype = named.pop() if named else "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise refused("dtype", f"{dtype!r} is not one of bfloat16, float16, float32")
    return cast(Dtype, dtype)


def _quantization(config: Mapping[str, Any]) -> Quantization | None:
    ours, theirs = config.get("quantization"), config.get("quantization_config")
    if ours is not None and theirs is not None and ours != theirs:
        raise refused("quantization_config", "contradicts quantization")
    field, value = ("quantization", ours) if ours is not None else ("quantization_config", theirs)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refused(field, f"expected an object, found {value!r}")
    if "quant_method" in value:
        if value["quant_method"] != "mxfp4":
            raise refused(
                f"{field}.quant_method", f"{value['quant_method']!r} is not supported, only mxfp4 is"
            )
        return Quantization(MXFP4, {}, experts_only=True)
    modules = {
        path: _format(f"{field}.{path}", each) if isinstance(each, Mapping) else _whether(field, path, each)
        for path, each in value.items()
        if path not in ("group_size", "bits", "mode")
    }
    default = _format(field, {name: value[name] for name in ("group_size", "bits", "mode") if name in value})
    return Quantization(default, {path: each for path, each in modules.items() if each != "default"})


def _whether(field: str, path: str, value: Any) -> Literal["default"] | None:
    if value is False:
        return None
    if value is True:
        return "default"
    raise refused(f"{field}.{path}", f"expected an object, true or false, found {value!r}")


def _format(field: str, value: Mapping[str, Any]) -> Format:
    if unknown := value.keys() - {"mode", "bits", "group_size"}:
        raise refused(f"{field}.{min(unknown)}", "unknown")
    mode, bits, group_size = value.get("mode", "affine"), value.get("bits"), value.get("group_size")
    if mode == "affine" and bits in _AFFINE_BITS and group_size in _AFFINE_GROUPS:
        return Format("affine", bits, group_size)
    if mode == "mxfp4" and (bits, group_size) == (MXFP4.bits, MXFP4.group_size):
        return MXFP4
    raise refused(field, f"mode {mode!r} with {bits!r} bits in groups of {group_size!r} is not supported")


def _ignored(config: Mapping[str, Any], used: set[str]) -> tuple[str, ...]:
    for name, neutral in _NEUTRAL.items():
        if name in config and config[name] not in neutral:
            raise refused(name, f"{config[name]!r} is not supported")
    return tuple(sorted(config.keys() - used - _HARMLESS - _NEUTRAL.keys()))
