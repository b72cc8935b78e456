"""The experts of a layer: chosen, run and mixed, over the parts of mlx-lm's ``MLPBlock``."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module

from darkbloom_core.experts import choose_experts, gated_experts, mix


def mix_experts(block: Module, x: mx.array) -> mx.array:
    """The output ``[B, L, H]`` of mlx-lm's ``MLPBlock`` for ``x`` ``[B, L, H]``."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, shares = choose_experts(block.router(tokens), block.num_experts_per_tok)
    mixed = mix(gated_experts(block.experts, tokens, chosen), shares)
    return mixed.reshape(x.shape)
