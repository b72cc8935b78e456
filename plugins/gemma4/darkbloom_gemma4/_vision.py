"""The vision tower: patches of pictures to soft tokens in the text model's space, as the reference computes it.

Nothing here evaluates an array. Imported only by ``load``.
"""

# mypy: disable-error-code="no-untyped-call"
# because the constructors of MLX's modules have no annotations

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from darkbloom_gemma4._vision_config import VisionConfig

Turns = tuple[tuple[mx.array, mx.array], tuple[mx.array, mx.array]]
"""Cosines and sines, each ``[N, P, 1, head_dim / 4]``, of the angles by column and of those by row."""


LEAST_PATCHES = 32
"""Of a part of a layer."""


class ClippedLinear(Module):
    """A linear layer whose inputs and outputs may be clipped to bounds that the checkpoint brings."""

    def __init__(self, columns: int, rows: int, *, clips: bool) -> None:
        super().__init__()
        self.linear = Linear(columns, rows, bias=False)
        self._clips = clips
        if clips:
            for name in ("input_min", "input_max", "output_min", "output_max"):
                setattr(self, name, mx.array(0.0))

    def __call__(self, x: mx.array) -> mx.array:
        if not self._clips:
            return self.linear(x)
        x = mx.clip(x, self.input_min, self.input_max)
        return mx.clip(self.linear(x), self.output_min, self.output_max)


class PatchEmbedder(Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.input_proj = Linear(config.patch_size, config.hidden_size, bias=False)
        self.position_embedding_table = mx.zeros((2, config.places, config.hidden_size))

    def __call__(self, patches: mx.array, positions: mx.array) -> mx.array:
        """``patches`` ``[N, P, patch_size]`` from 0 to 1, ``positions`` ``[N, P, 2]`` (column, row), -1 for no patch."""
        place = mx.maximum(positions, 0)
        by_column, by_row = self.position_embedding_table[0], self.position_embedding_table[1]
        embedded = by_column[place[..., 0]] + by_row[place[..., 1]]
        pixels = (2 * (patches - 0.5)).astype(embedded.dtype)
        projected: mx.array = self.input_proj(pixels)
        return projected + mx.where(_is_patch(positions)[..., None], embedded, 0)


class VisionAttention(Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        self._norm_epsilon = config.norm_epsilon
        hidden, q_size = config.hidden_size, config.heads * config.head_dim
        kv_size = config.kv_heads * config.head_dim
        self.q_proj = ClippedLinear(hidden, q_size, clips=config.clips)
        self.k_proj = ClippedLinear(hidden, kv_size, clips=config.clips)
        self.v_proj = ClippedLinear(hidden, kv_size, clips=config.clips)
        self.o_proj = ClippedLinear(q_size, hidden, clips=config.clips)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon)

    def looked_at(self, x: mx.array, turns: Turns) -> tuple[mx.array, mx.array]:
        """Keys and values ``[N, heads, P, head_dim]`` of all patches."""
        k = _turn(self.k_norm(self._split(self.k_proj(x))), turns)
        v = mx.fast.rms_norm(self._split(self.v_proj(x)), None, self._norm_epsilon)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def __call__(
        self, x: mx.array, turns: Turns, k: mx.array, v: mx.array, mask: mx.array | None
    ) -> mx.array:
        """Some patches, ``x`` and their ``turns``, that look at all."""
        q = _turn(self.q_norm(self._split(self.q_proj(x))), turns).swapaxes(1, 2)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._head_dim)


class VisionMlp(Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gate_proj = ClippedLinear(config.hidden_size, config.mlp_size, clips=config.clips)
        self.up_proj = ClippedLinear(config.hidden_size, config.mlp_size, clips=config.clips)
        self.down_proj = ClippedLinear(config.mlp_size, config.hidden_size, clips=config.clips)

    def __call__(self, x: mx.array) -> mx.array:
        gated: mx.array = gelu_approx(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated)


class VisionLayer(Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.self_attn = VisionAttention(config)
        self.mlp = VisionMlp(config)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", RMSNorm(config.hidden_size, eps=config.norm_epsilon))

    def looked_at(self, x: mx.array, turns: Turns) -> tuple[mx.array, mx.array]:
        """What patches are looked at by: keys and values of all of ``x`` ``[N, P, hidden]``."""
        return self.self_attn.looked_at(self.input_layernorm(x), turns)

    def __call__(
        self, x: mx.array, turns: Turns, k: mx.array, v: mx.array, mask: mx.array | None
    ) -> mx.array:
        """Some of the patches, through the layer."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), turns, k, v, mask))
        out: mx.array = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return out


class Encoder(Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = [VisionLayer(config) for _ in range(config.layer_count)]


class VisionTower(Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = Encoder(config)
        if config.standardizes:
            self.std_bias = mx.zeros((config.hidden_size,))
            self.std_scale = mx.ones((config.hidden_size,))


class Projection(Module):
    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        self._norm_epsilon = config.norm_epsilon
        self.embedding_projection = Linear(config.hidden_size, text_hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.embedding_projection(mx.fast.rms_norm(x, None, self._norm_epsilon))


class Vision(Module):
    """Tower and projection. Parameters are named as MLX conversions name them."""

    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        self._config = config
        self.vision_tower = VisionTower(config)
        self.embed_vision = Projection(config, text_hidden_size)

    def __call__(self, patches: mx.array, positions: mx.array) -> mx.array:
        """``patches`` ``[N, P, patch_size]`` and ``positions`` ``[N, P, 2]`` to ``[N, P / pooling**2, H]``.

        A picture with fewer patches than ``P`` has its soft tokens first; the rows after
        them mean nothing.
        """
        mask = _is_patch(positions)[:, None, None, :]
        x = self.embed(patches, positions)
        x, _ = self.run_parts((x, positions), mask, 0, self.layer_count, 1)
        return self.finish(x, positions)

    @property
    def layer_count(self) -> int:
        return len(self.vision_tower.encoder.layers)

    def embed(self, patches: mx.array, positions: mx.array) -> mx.array:
        """``[N, P, hidden]``, before the first layer."""
        x: mx.array = self.vision_tower.patch_embedder(patches, positions)
        return x

    def run_parts(
        self, state: tuple[mx.array, ...], mask: mx.array | None, first: int, last: int, parts: int
    ) -> tuple[mx.array, ...]:
        """Parts ``first`` to ``last - 1``, where each layer has ``parts``: equal shares of the patches, of few nothing.

        ``state`` is hidden states ``[N, P, hidden]`` and positions; inside a layer also its keys,
        its values, and the patches that are through. ``mask`` None: every patch is one.
        """
        turns = _turns(state[1], self._config)
        for number in range(first, last):
            state = self._run_part(state, turns, mask, *divmod(number, parts), parts)
        return state

    def _run_part(
        self,
        state: tuple[mx.array, ...],
        turns: Turns,
        mask: mx.array | None,
        number: int,
        part: int,
        parts: int,
    ) -> tuple[mx.array, ...]:
        layer = self.vision_tower.encoder.layers[number]
        x, positions, *rest = state
        if part == 0:
            rest = [*layer.looked_at(x, turns)]
        patches = x.shape[1]
        each = max(LEAST_PATCHES, -(-patches // parts))
        begin, end = (min(patches, at * each) for at in (part, part + 1))
        if begin < end:
            rest.append(layer(x[:, begin:end], _of_patches(turns, begin, end), rest[0], rest[1], mask))
        if part < parts - 1:
            return (x, positions, *rest)
        return (mx.concatenate(rest[2:], axis=1), positions)

    def finish(self, x: mx.array, positions: mx.array) -> mx.array:
        """``[N, P / pooling**2, H]`` after the last layer."""
        x = self._pool(x, positions)
        if self._config.standardizes:
            bias, scale = self.vision_tower.std_bias, self.vision_tower.std_scale
            x = (x - bias.astype(mx.float32)) * scale.astype(mx.float32)
        dtype = self.vision_tower.patch_embedder.position_embedding_table.dtype
        return self.embed_vision(x.astype(dtype))

    def _pool(self, x: mx.array, positions: mx.array) -> mx.array:
        """The mean of each square of patches, times the root of their width, in float32."""
        pooling, hidden = self._config.pooling, self._config.hidden_size
        soft_tokens = x.shape[1] // pooling**2
        place = mx.maximum(positions, 0)
        columns = (place[..., 0].max(axis=-1, keepdims=True) + 1) // pooling
        square = place[..., 0] // pooling + columns * (place[..., 1] // pooling)
        belongs = (square[..., None] == mx.arange(soft_tokens)) & _is_patch(positions)[..., None]
        shares = belongs.astype(mx.float32) / pooling**2
        pooled: mx.array = shares.swapaxes(1, 2) @ x.astype(mx.float32) * hidden**0.5
        return pooled


def _is_patch(positions: mx.array) -> mx.array:
    """``[N, P]`` bool: False where there is only padding."""
    return (positions != -1).any(axis=-1)


def _turns(positions: mx.array, config: VisionConfig) -> Turns:
    half = config.head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = mx.array(np.float32(1) / np.float32(config.rope_theta) ** exponents)

    def turns(axis: int) -> tuple[mx.array, mx.array]:
        angles = (positions[..., axis, None].astype(mx.float32) * frequencies)[:, :, None]
        return mx.cos(angles), mx.sin(angles)

    return turns(0), turns(1)


def _of_patches(turns: Turns, begin: int, end: int) -> Turns:
    columns, rows = (tuple(each[:, begin:end] for each in pair) for pair in turns)
    return (columns[0], columns[1]), (rows[0], rows[1])


def _turn(x: mx.array, turns: Turns) -> mx.array:
    """``x`` ``[N, P, heads, head_dim]``: its first half turned by column, its second by row."""
    turned = []
    for half, (cosines, sines) in zip(mx.split(x, 2, axis=-1), turns, strict=True):
        first, second = mx.split(half, 2, axis=-1)
        cosines, sines = cosines.astype(x.dtype), sines.astype(x.dtype)
        turned += [first * cosines - second * sines, second * cosines + first * sines]
    return mx.concatenate(turned, axis=-1)
