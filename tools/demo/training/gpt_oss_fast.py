"""The same GPT-OSS as that of ``transformers``, in a way that trains faster. ``check`` shows that it is the same.

Sliding layers attend in blocks of a window; full layers use flash attention, with the sink
as an extra key; experts are dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss

from tools.demo.training.experts import Routing, computing_dtype, spread_weights

ATTENTION = "demo_training"
"""The name that our attention is registered under."""

LIMIT, ALPHA = 7.0, 1.702
"""Of GPT-OSS's clamped activation."""


@contextmanager
def fast(model: Any) -> Iterator[None]:
    """Inside, ``model`` runs our experts and our attention, and its routers remember what they did."""
    experts, router = modeling_gpt_oss.GptOssExperts, modeling_gpt_oss.GptOssTopKRouter
    stock_experts, stock_router = experts.forward, router.forward
    stock_attention = model.config._attn_implementation

    def routed(self: Any, hidden: Tensor) -> Any:
        result = stock_router(self, hidden)
        self.demo_routing = result[0], result[2]
        return result

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    experts.forward, router.forward = _experts, routed
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        experts.forward, router.forward = stock_experts, stock_router
        model.config._attn_implementation = stock_attention


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """``[B, L, H]`` after the last norm. No masks are given: our attention knows what each layer may see."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    no_masks = {"full_attention": None, "sliding_attention": None}
    output = model.model(input_ids=ids, attention_mask=no_masks, position_ids=positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def routings(model: Any) -> list[Routing]:
    """What the routers did in the last forward pass."""
    found = [layer.mlp.router.demo_routing for layer in model.model.layers]
    return [Routing(logits.float().softmax(-1), chosen) for logits, chosen in found]


def _experts(
    self: Any, hidden_states: Tensor, router_indices: Any = None, routing_weights: Any = None
) -> Tensor:
    """In the place of ``GptOssExperts.forward``."""
    weights = spread_weights(router_indices, routing_weights, self.num_experts)
    dtype = computing_dtype(hidden_states)
    matrices = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
    out = _dense_experts(hidden_states.to(dtype), weights, *(each.to(dtype) for each in matrices))
    return out.to(hidden_states.dtype)


def _dense_experts(
    x: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    """All experts on all tokens. ``x`` is ``[tokens, H]``, ``weights`` ``[tokens, experts]``."""
    experts, hidden, double = gate_up.shape
    both = (x @ gate_up.permute(1, 0, 2).reshape(hidden, experts * double)).view(-1, experts, double)
    both = both + gate_up_bias
    gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(-LIMIT, LIMIT)
    activated = (up + 1) * (gate * torch.sigmoid(gate * ALPHA)) * weights[..., None]
    activated = activated.to(x.dtype).reshape(-1, experts * double // 2)
    return activated @ down.reshape(experts * double // 2, hidden) + weights.to(x.dtype) @ down_bias


def _attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: None,
    scaling: float,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """In the place of an attention function of ``transformers``; ``s_aux`` are the sinks ``[heads]``."""
    assert s_aux is not None
    length = q.shape[2]
    v = v.to(q.dtype)
    window = module.sliding_window
    if window:
        padding = -length % window
        if padding:
            q, k, v = (F.pad(each, (0, 0, 0, padding)) for each in (q, k, v))
        out = _sliding_attention(q * scaling, k, v, s_aux, window)[:, :, :length]
    else:
        out = _full_attention(q * scaling, k, v, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _full_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Causal flash attention over one more key, at position 0, whose product with any query is the sink.

    A head dimension more makes that possible: it is 1 in every query, the sink in the extra
    key and 0 in all others. (Seven more keep the dimension a multiple of 8.)
    """
    batch, heads, _, dim = q.shape
    groups = heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q = F.pad(F.pad(q, (0, 1), value=1.0), (0, 7, 1, 0))
    k = F.pad(k, (0, 8, 1, 0))
    sink = F.pad(sinks.to(q.dtype).view(1, heads, 1, 1), (dim, 7)).expand(batch, heads, 1, dim + 8)
    k = torch.cat([sink, k[:, :, 1:]], 2)
    v = F.pad(v, (0, 8, 1, 0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[:, :, 1:, :dim]


def _sliding_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Attention in blocks of ``window``, which divides the length: a block sees itself and the one before."""
    batch, heads, length, dim = q.shape
    blocks = length // window
    groups = heads // k.shape[1]
    queries = q.reshape(batch, heads, blocks, window, dim)
    keys, values = (_with_block_before(each, window).repeat_interleave(groups, 1) for each in (k, v))
    scores = (queries @ keys.transpose(-1, -2)).float()
    place = torch.arange(window, device=q.device)
    seen_place = torch.arange(2 * window, device=q.device)[None]
    distance = place[:, None] + window - seen_place
    allowed = (distance >= 0) & (distance < window)
    is_first = (torch.arange(blocks, device=q.device) == 0)[:, None, None]
    allowed = torch.where(is_first, allowed & (seen_place >= window), allowed)
    scores = scores.masked_fill(~allowed, float("-inf"))
    sink = sinks.float().view(1, heads, 1, 1, 1).expand(batch, heads, blocks, window, 1)
    weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1].to(v.dtype)
    return (weights @ values).reshape(batch, heads, length, dim)


def _with_block_before(x: Tensor, window: int) -> Tensor:
    """``[B, heads, L, D]`` to ``[B, heads, blocks, 2 * window, D]``."""
    blocks = x.reshape(x.shape[0], x.shape[1], -1, window, x.shape[3])
    nothing = torch.zeros_like(blocks[:, :, :1])
    return torch.cat([torch.cat([nothing, blocks[:, :, :-1]], 2), blocks], 3)
