"""The same weights in mlx-lm's own class, for benchmarks that compare with it. Never used to serve."""

# mypy: disable-error-code="no-untyped-call"
# because MLX's and mlx-lm's modules have no annotations

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gpt_oss import Model, ModelArgs

from darkbloom_core.errors import UnsupportedCheckpoint
from darkbloom_gpt_oss._config import GptOssConfig

Packing = tuple[str, int, int]
"""Mode, bits and group size of a quantised module."""


def mlx_lm_model(
    ours: Module, fused: Sequence[tuple[list[mx.array], Packing | None]], config: GptOssConfig
) -> Model:
    """``ours``, whose q, k and v projections are in ``fused``, as mlx-lm holds a checkpoint.

    Matrices are row-contiguous, shared where ours are that already. The rotary embedding is
    mlx-lm's, with this family's frequencies. Raises ``UnsupportedCheckpoint`` if q, k and v
    of a layer are packed unlike each other.
    """
    arrays = dict(cast("list[tuple[str, mx.array]]", tree_flatten(ours.parameters())))
    packings: dict[str, Packing] = {
        name: (module.mode, module.bits, module.group_size)
        for name, module in ours.named_modules()
        if "scales" in module
    }
    for index, (parts, packing) in enumerate(fused):
        for name, pieces in _split(parts, packing, config).items():
            path = f"model.layers.{index}.self_attn.{name}"
            arrays |= {f"{path}.{part}": piece for part, piece in pieces.items()}
            if packing is not None:
                packings[path] = packing

    def format_of(path: str, _: Module) -> bool | dict[str, Any]:
        if path not in packings:
            return False
        mode, bits, group_size = packings[path]
        return {"group_size": group_size, "bits": bits, "mode": mode}

    model = Model(_arguments(config))
    quantize(model, class_predicate=format_of)
    model.load_weights([(name, mx.contiguous(array)) for name, array in arrays.items()], strict=True)
    periods = mx.array(1.0 / config.rope.inverse_frequencies())
    for layer in model.layers:
        layer.mlp.experts.activation = SwigluOAI(config.swiglu_alpha, config.swiglu_limit)
        if config.rope.yarn is not None:
            layer.self_attn.rope.mscale = config.rope.attention_factor
            layer.self_attn.rope._freqs = periods
    model.freeze()
    return model


def _split(
    parts: list[mx.array], packing: Packing | None, config: GptOssConfig
) -> dict[str, dict[str, mx.array]]:
    """The arrays of each projection, out of those of all three."""
    if packing is None:
        if len(parts) != 2:
            raise UnsupportedCheckpoint(
                "q, k and v are packed unlike each other: there is no peer to compare with"
            )
        named = {"weight": parts[0].T, "bias": parts[1]}
    else:
        named = dict(zip(("weight", "scales", "bias", "biases"), parts, strict=False))
    sizes = [heads * config.head_dim for heads in (config.q_heads, config.kv_heads, config.kv_heads)]
    split = {part: mx.split(array, list(accumulate(sizes))[:-1]) for part, array in named.items()}
    return {
        name: {part: pieces[index] for part, pieces in split.items()}
        for index, name in enumerate(("q_proj", "k_proj", "v_proj"))
    }


def _arguments(config: GptOssConfig) -> ModelArgs:
    yarn = config.rope.yarn
    scaling = yarn and {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    return ModelArgs(
        num_hidden_layers=len(config.windows),
        num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        head_dim=config.head_dim,
        num_attention_heads=config.q_heads,
        num_key_value_heads=config.kv_heads,
        sliding_window=next((window for window in config.windows if window is not None), 128),
        rope_theta=cast(int, config.rope.theta),  # a number, whatever the annotation says
        rope_scaling=scaling,
        layer_types=[
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
    )
