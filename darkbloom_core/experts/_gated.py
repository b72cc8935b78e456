"""Tokens through the experts that they chose, the way that is right and fast on this device.

Always true: what is handed to a gathered matmul has plain row-major strides. MLX's CUDA
kernel for sorted experts takes the distance between rows from the stride of the dimension
of size 1 before the last. A sum with a bias can leave anything there: which operand gives
its strides depends on which one MLX may overwrite, and so on timing.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module

from darkbloom_core.experts._linear import packing_of
from darkbloom_core.experts._mxfp4_cuda import ExpertLists, mxfp4_product, serves

SORTED_PAIRS = 64
"""From this many pairs of a token and an expert on, those of one expert are brought together."""

UNPACKED_TOKENS = 20
"""On CUDA packed experts that no kernel of ours serves are unpacked first from this many tokens an expert on: measured on an H200."""


def gated_experts(
    experts: Module, tokens: mx.array, chosen: mx.array, *, unpack: bool | None = None
) -> mx.array:
    """``tokens`` ``[T, H]`` through the experts ``chosen`` ``[T, K]``: ``[T, K, H]``, in no order but the callers'.

    ``experts`` has the parts of mlx-lm's ``SwitchGLU``: ``gate_proj``, ``up_proj`` and
    ``down_proj``, each with a ``weight`` ``[E, out, in]``, packed if there are ``scales``,
    and perhaps a ``bias`` ``[E, out]``; and ``activation``, called with up and gate.
    ``unpack`` says whether packed weights are unpacked before they are multiplied by,
    which takes the memory of one plain matrix; None: where that is faster.
    """
    count, each = chosen.shape
    packed = "scales" in experts.gate_proj
    on_cuda = mx.cuda.is_available()
    if on_cuda and packed and not unpack and _all_served(experts, tokens):
        return _by_kernel(experts, tokens, chosen)
    if unpack is None:
        unpack = on_cuda and chosen.size >= UNPACKED_TOKENS * experts.gate_proj["weight"].shape[0]
    # MLX's CUDA kernel for packed experts does not look whether they are sorted.
    if chosen.size < SORTED_PAIRS or (on_cuda and packed and not unpack):
        return _feed_forward(experts, tokens[:, None], chosen, is_sorted=False, unpack=unpack)
    pairs = chosen.flatten()
    order = mx.argsort(pairs)
    found = _feed_forward(experts, tokens[order // each], pairs[order], is_sorted=True, unpack=unpack)
    return found[mx.argsort(order)].reshape(count, each, -1)


def _all_served(experts: Module, tokens: mx.array) -> bool:
    parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
    return all(serves(tokens, part["weight"], packing_of(part)) for part in parts)


def _by_kernel(experts: Module, tokens: mx.array, chosen: mx.array) -> mx.array:
    lists = ExpertLists.of(chosen.flatten().astype(mx.uint32), experts.gate_proj["weight"].shape[0])

    def product(part: Module, x: mx.array) -> mx.array:
        return mxfp4_product(x, part["weight"], part["scales"], part.get("bias"), lists)

    up, gate = product(experts.up_proj, tokens), product(experts.gate_proj, tokens)
    return product(experts.down_proj, experts.activation(up, gate)).reshape(*chosen.shape, -1)


def _feed_forward(
    experts: Module, x: mx.array, chosen: mx.array, *, is_sorted: bool, unpack: bool
) -> mx.array:
    """``x``, ``[..., H]`` and broadcast to ``chosen``, through one expert each: ``[..., H]``."""
    up = _linear(experts.up_proj, x, chosen, is_sorted, unpack)
    gate = _linear(experts.gate_proj, x, chosen, is_sorted, unpack)
    return _linear(experts.down_proj, experts.activation(up, gate), chosen, is_sorted, unpack)


def _linear(linear: Module, x: mx.array, chosen: mx.array, is_sorted: bool, unpack: bool) -> mx.array:
    weight, packing = linear["weight"], packing_of(linear)
    rows = x.reshape(*x.shape[:-1], 1, x.shape[-1])
    if packing and not unpack:
        product = mx.gather_qmm(
            rows,
            weight,
            linear["scales"],
            linear.get("biases"),
            rhs_indices=chosen,
            transpose=True,
            sorted_indices=is_sorted,
            **packing,
        )
    else:
        if packing:
            weight = mx.dequantize(weight, linear["scales"], linear.get("biases"), **packing).astype(x.dtype)
        product = mx.gather_mm(rows, weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=is_sorted)
    found: mx.array = product.squeeze(-2)
    return found + linear["bias"][chosen] if "bias" in linear else found
