"""The same weights in mlx-lm's own class, for benchmarks that compare with it. Never used to serve."""

# mypy: disable-error-code="no-untyped-call"
# because MLX's and mlx-lm's modules have no annotations

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.gemma4_text import Model, ModelArgs

from darkbloom_gemma4._config import Gemma4Config, LayerConfig
from darkbloom_gemma4._rotary import Rotary


def mlx_lm_model(ours: Module, config: Gemma4Config) -> Model:
    """``ours`` (a ``TextModel``) as mlx-lm holds it: row-contiguous matrices, shared where ours are that already."""
    model = Model(_arguments(config))
    own = dict(ours.named_modules())

    def packing(name: str, _: Module) -> bool | dict[str, Any]:
        module = own.get(name.removeprefix("model."))
        if module is None or "scales" not in module:
            return False
        return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}

    quantize(model, class_predicate=packing)
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(ours.parameters()))
    model.load_weights([(_renamed(name), mx.contiguous(array)) for name, array in arrays], strict=True)
    model.freeze()
    return model


def _renamed(name: str) -> str:
    """In mlx-lm's class all but the head stands below ``model``."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _arguments(config: Gemma4Config) -> ModelArgs:
    layers = config.layers
    sliding = next((layer for layer in layers if layer.sliding), layers[0])
    full = next((layer for layer in layers if not layer.sliding), layers[-1])
    owners = sum(layer.source is None for layer in layers)
    experts = config.experts
    return ModelArgs(
        hidden_size=config.hidden_size,
        num_hidden_layers=len(layers),
        intermediate_size=layers[0].mlp_size,
        num_attention_heads=config.heads,
        head_dim=sliding.head_dim,
        global_head_dim=full.head_dim,
        rms_norm_eps=config.norm_epsilon,
        vocab_size=config.vocab_size,
        vocab_size_per_layer_input=config.per_layer_vocab_size,
        num_key_value_heads=sliding.kv_heads,
        num_global_key_value_heads=full.kv_heads,
        num_kv_shared_layers=len(layers) - owners,
        hidden_size_per_layer_input=config.per_layer_size,
        rope_parameters={
            "full_attention": _rope(config.full_rotary),
            "sliding_attention": _rope(config.sliding_rotary),
        },
        sliding_window=config.window,
        max_position_embeddings=config.context_tokens,
        attention_k_eq_v=any(layer.k_equals_v for layer in layers),
        final_logit_softcapping=cast(float, config.softcap),  # None is no cap, whatever the annotation says
        use_double_wide_mlp=layers[-1].mlp_size > layers[0].mlp_size,
        enable_moe_block=experts is not None,
        num_experts=None if experts is None else experts.count,
        top_k_experts=None if experts is None else experts.chosen,
        moe_intermediate_size=None if experts is None else experts.size,
        layer_types=[_type(layer) for layer in layers],
        tie_word_embeddings=config.tied,
    )


def _type(layer: LayerConfig) -> str:
    return "sliding_attention" if layer.sliding else "full_attention"


def _rope(rotary: Rotary) -> dict[str, Any]:
    return {
        "rope_type": "default" if (rotary.fraction, rotary.factor) == (1.0, 1.0) else "proportional",
        "rope_theta": rotary.theta,
        "partial_rotary_factor": rotary.fraction,
        "factor": rotary.factor,
    }
