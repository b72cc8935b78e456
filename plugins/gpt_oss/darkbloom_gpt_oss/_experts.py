"""The experts of a layer: chosen, run and mixed, over the parts of mlx-lm's ``MLPBlock``."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module

from darkbloom_core.experts import gated_experts


def mix_experts(block: Module, x: mx.array) -> mx.array:
    """The output ``[B, L, H]`` of mlx-lm's ``MLPBlock`` for ``x`` ``[B, L, H]``."""
    tokens = x.reshape(-1, x.shape[-1])
    count = block.num_experts_per_tok
    scores = block.router(tokens)
    chosen = mx.argpartition(scores, kth=-count, axis=-1)[:, -count:]
    shares = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1, precise=True)
    mixed: mx.array = (gated_experts(block.experts, tokens, chosen) * shares[..., None]).sum(axis=-2)
    return mixed.reshape(x.shape)
