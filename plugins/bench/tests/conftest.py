"""A toy model that both sides can run: the core's toy family, and the same weights as a module of mlx-lm."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from darkbloom_bench._subject import Subject
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from toy_family import ToyModel, full, window


class ToyModule(nn.Module):
    """``ToyModel``'s computation over mlx-lm's caches."""

    def __init__(self, toy):
        super().__init__()
        self.kinds = toy.layers
        self.table, self.head, self.weights = toy.table, toy.head, toy.weights

    @property
    def layers(self):
        return self.weights

    def make_cache(self):
        return [
            KVCache() if kind.window is None else RotatingKVCache(max_size=kind.window) for kind in self.kinds
        ]

    def __call__(self, ids, cache):
        x = self.table[ids]
        for kind, weight, layer_cache in zip(self.kinds, self.weights, cache, strict=True):
            h = x * mx.rsqrt(mx.mean(x**2, -1, keepdims=True))
            mask = create_attention_mask(x, layer_cache, window_size=kind.window)

            def heads(name, kind=kind, weight=weight, h=h):
                return (h @ weight[name].T).reshape(*h.shape[:2], -1, kind.k_dim).swapaxes(1, 2)

            def rope(y, kind=kind, offset=layer_cache.offset):
                return mx.fast.rope(y, kind.k_dim, traditional=False, base=100.0, scale=1.0, offset=offset)

            q, k = rope(heads("q")), rope(heads("k"))
            k, v = layer_cache.update_and_fetch(k, heads("v"))
            out = scaled_dot_product_attention(q, k, v, layer_cache, kind.scale, mask=mask)
            x = x + out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ weight["o"].T
            x = x + mx.tanh(x @ weight["mlp"].T)
        return (x * mx.rsqrt(mx.mean(x**2, -1, keepdims=True))) @ self.head.T


class ComparableToy(ToyModel):
    def mlx_lm_model(self):
        return ToyModule(self)


@pytest.fixture
def toy_subject():
    """A subject with a full and a window layer; arguments go to the toy model."""

    def make(**arguments):
        layers = (full(), window(32))
        description = ComparableToy(layers).description
        return Subject("toy", description, lambda: ComparableToy(layers, **arguments))

    return make
