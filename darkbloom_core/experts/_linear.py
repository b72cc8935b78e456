"""Products with packed matrices, the way that is fast on this device."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from darkbloom_core.experts._mxfp4_cuda import mxfp4_product, serves


def packed_linear(linear: Module, x: mx.array) -> mx.array:
    """``x`` ``[..., in]`` through an MLX ``Linear``, or an ``Embedding`` the other way round: ``[..., out]``.

    MLX multiplies a single row by an MXFP4 matrix fast on CUDA, and several slowly.
    """
    packing = packing_of(linear)
    rows = x.size // x.shape[-1]
    if packing and rows > 1 and mx.cuda.is_available() and serves(x, linear["weight"], packing):
        product = mxfp4_product(x.reshape(rows, -1), linear["weight"], linear["scales"], linear.get("bias"))
        return product.reshape(*x.shape[:-1], -1)
    if isinstance(linear, Embedding | QuantizedEmbedding):
        found: mx.array = linear.as_linear(x)  # type: ignore[no-untyped-call]  # MLX leaves it unannotated
        return found
    return linear(x)  # type: ignore[no-any-return]


def packing_of(linear: Module) -> dict[str, Any]:
    """How the weight is packed, as MLX's functions take it; empty if it is plain."""
    if "scales" not in linear:
        return {}
    return {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
