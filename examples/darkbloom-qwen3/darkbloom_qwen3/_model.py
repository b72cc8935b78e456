"""The network, and how the core runs it.

Modules and their attributes are named as the tensors of the checkpoint are, so
``model.layers.3.self_attn.q_proj.weight`` is the path to a weight in both. Nothing here
keeps a cache, builds a mask or knows how many requests run: the core does that, from the
layer list of ``_config``. And nothing here evaluates an array (no ``.item()``, no
``mx.eval``, no ``if`` on a value): it only builds the graph.

Shapes: ``B`` rows of the batch, ``L`` tokens of each in this step, ``H`` hidden size, ``D``
head dimension.
"""

# mypy: disable-error-code="no-untyped-call"
# because the constructors of MLX's modules have no annotations

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from darkbloom_core.contracts import Batch, Inputs, LayerCache, MediaEmbeddings, ModelDescription
from darkbloom_qwen3._config import Qwen3Config


class Attention(nn.Module):
    """Grouped-query attention, with q and k normalised per head before they are rotated."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        head_dim = config.head_dim
        self._head_dim = head_dim
        self._periods = rotary_periods(head_dim, config.rope_theta)  # a leading _ keeps it out of the weights
        self.q_proj = nn.Linear(config.hidden_size, config.q_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.q_heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, config.norm_epsilon)
        self.k_norm = nn.RMSNorm(head_dim, config.norm_epsilon)

    def __call__(self, x: mx.array, offsets: mx.array, cache: LayerCache) -> mx.array:
        """``x`` is ``[B, L, H]``; the first token of row ``b`` stands at position ``offsets[b]``."""
        q = self._rotate(self.q_norm(self._heads(self.q_proj(x))), offsets)
        k = self._rotate(self.k_norm(self._heads(self.k_proj(x))), offsets)
        v = self._heads(self.v_proj(x))
        # The one call to the core: it stores k and v, and attends q to all that this layer may see.
        out = cache.attend(q, k, v)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))

    def _heads(self, x: mx.array) -> mx.array:
        """``[B, L, heads * D]`` to ``[B, heads, L, D]``."""
        return mx.unflatten(x, 2, (-1, self._head_dim)).swapaxes(1, 2)

    def _rotate(self, x: mx.array, offsets: mx.array) -> mx.array:
        """Rotary embedding of ``[B, heads, L, D]``, each row from its own position on."""
        return mx.fast.rope(
            x, self._head_dim, traditional=False, base=None, scale=1.0, offset=offsets, freqs=self._periods
        )


def rotary_periods(head_dim: int, theta: float) -> mx.array:
    """``[D / 2]`` float32: in how many positions each pair of a head's elements turns by one radian.

    ``mx.fast.rope`` could work them out from ``theta`` by itself, but it rounds them otherwise
    than the reference. After a thousand positions that shows in the logits.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return mx.array(np.float32(theta) ** exponents)


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer, ``[B, L, H]`` to ``[B, L, H]``."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config)

    def __call__(self, x: mx.array, offsets: mx.array, cache: LayerCache) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), offsets, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What the checkpoint calls ``model``: embeddings, layers and the last norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config) for _ in range(config.layers)]
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)


class Network(nn.Module):
    """All modules with weights. A tied head is the embedding, used the other way round."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.model = Body(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def tensors(self) -> dict[str, mx.array]:
        """Every parameter by its path, which is its name in the checkpoint."""
        return dict(cast("list[tuple[str, mx.array]]", tree_flatten(self.parameters())))


class LoadedQwen3:
    """A model in memory; matches ``darkbloom_core.contracts.LoadedModel`` by having its members.

    Every call comes from the thread that loaded it.
    """

    vision = None  # it does not see

    def __init__(
        self,
        description: ModelDescription,
        config: Qwen3Config,
        network: Network,
        stop_ids: frozenset[int],
    ) -> None:
        self.description = description
        self.stop_ids = stop_ids
        self.weight_bytes = sum(array.nbytes for array in network.tensors().values())
        self._body = network.model
        self._head = network.model.embed_tokens.as_linear if config.tied else network.lm_head

    def embed(self, ids: mx.array, media: MediaEmbeddings | None = None) -> Inputs:
        """``[B, L]`` token ids to what the first layer takes: here the hidden state ``[B, L, H]`` alone."""
        return (self._body.embed_tokens(ids),)

    def run_layers(self, inputs: Inputs, batch: Batch, first: int, last: int) -> Inputs:
        """Layers ``first`` to ``last - 1``.

        A long prompt is run a few layers at a time, so that others can decode in between;
        a decode step runs them all. It makes no difference here.
        """
        (hidden,) = inputs
        for index in range(first, last):
            hidden = self._body.layers[index](hidden, batch.offsets, batch.caches[index])
        return (hidden,)

    def logits(self, hidden: mx.array) -> mx.array:
        """``[B, 1, H]``, the positions that the core chose, to ``[B, vocab_size]``."""
        return self._head(self._body.norm(hidden))[:, 0]
