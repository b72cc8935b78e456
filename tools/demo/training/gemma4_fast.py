"""The same Gemma 4 as that of ``transformers``, with shapes that do not depend on the data. ``check`` shows that it is.

Experts are dense; every picture of a batch gets the same room, and soft tokens take their
features from it by index. Masks are built here: sliding layers see within the window what
is earlier or in the same picture, full layers what is earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4

from tools.demo.training.experts import Routing, computing_dtype, spread_weights
from tools.demo.training.gemma_format import ID

WINDOW = 128
SOFTCAP = 30.0
PATCHES_IN_A_CELL = 9


@contextmanager
def fast(_: Any) -> Iterator[None]:
    """Inside, models of this kind run our experts, and their routers remember what they did."""
    experts, router = modeling_gemma4.Gemma4TextExperts, modeling_gemma4.Gemma4TextRouter
    stock_experts, stock_router = experts.forward, router.forward

    def routed(self: Any, hidden: Tensor) -> Any:
        result = stock_router(self, hidden)
        self.demo_routing = result[0], result[2]
        return result

    experts.forward, router.forward = _experts, routed
    try:
        yield
    finally:
        experts.forward, router.forward = stock_experts, stock_router


def routings(model: Any) -> list[Routing]:
    """What the routers did in the last forward pass."""
    found = [layer.router.demo_routing for layer in model.model.language_model.layers]
    return [Routing(probabilities.float(), chosen) for probabilities, chosen in found]


def is_soft_token(ids: Tensor) -> Tensor:
    return (ids == ID["<|image|>"]) | (ids == ID["<|video|>"])


def embedded(model: Any, ids: Tensor) -> Tensor:
    """``[B, L, H]``; soft tokens are still those of the padding."""
    embeddings: Tensor = model.model.language_model.embed_tokens(torch.where(is_soft_token(ids), 0, ids))
    return embeddings


def features(model: Any, pixels: Tensor, positions: Tensor) -> Tensor:
    """``[N * P / 9, H]``: what soft tokens are filled with, P / 9 places for each picture.

    ``pixels`` is ``[N, P, 768]``, ``positions`` ``[N, P, 2]``. Places beyond a picture hold
    nothing that may be read.
    """
    tower = model.model.vision_tower
    is_padding = (positions == -1).all(-1)
    hidden = tower.patch_embedder(pixels, positions, is_padding)
    rotary = tower.encoder.rotary_emb(hidden, positions)
    mask = (~is_padding)[:, None, None].expand(-1, 1, hidden.shape[1], -1)
    for layer in tower.encoder.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
    hidden, _ = tower.pooler(
        hidden_states=hidden,
        pixel_position_ids=positions,
        padding_positions=is_padding,
        output_length=hidden.shape[1] // PATCHES_IN_A_CELL,
    )
    standardized = ((hidden - tower.std_bias) * tower.std_scale).flatten(0, 1)
    seen: Tensor = model.model.embed_vision(inputs_embeds=standardized)
    return seen


def filled(model: Any, ids: Tensor, embeddings: Tensor, pixels: Tensor, positions: Tensor) -> Tensor:
    """``embeddings`` with the soft tokens filled, by the reference's own vision tower.

    Its shapes depend on the data, so it suits evaluation only.
    """
    tower = model.model.vision_tower(pixel_values=pixels, pixel_position_ids=positions)
    seen = model.model.embed_vision(inputs_embeds=tower.last_hidden_state)
    place = is_soft_token(ids)[..., None].expand_as(embeddings)
    return embeddings.masked_scatter(place, seen.to(embeddings.dtype))


def hidden_states(model: Any, ids: Tensor, embeddings: Tensor) -> Tensor:
    """``[B, L, H]`` after the last norm."""
    output = model.model.language_model(
        inputs_embeds=embeddings,
        attention_mask=_masks(ids),
        position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def logits(model: Any, hidden: Tensor) -> Tensor:
    """``[..., H]`` to ``[..., vocabulary]`` in float32, soft cap included."""
    return torch.tanh(model.lm_head(hidden).float() / SOFTCAP) * SOFTCAP


def _masks(ids: Tensor) -> dict[str, Tensor]:
    """``[B, 1, L, L]`` for each kind of layer; true where a query may look."""
    rows, length = ids.shape
    soft = is_soft_token(ids)
    begins = soft & ~F.pad(soft, (1, 0))[:, :-1]
    picture = torch.where(soft, begins.cumsum(1) - 1, -1)
    place = torch.arange(length, device=ids.device)
    causal = (place[:, None] >= place[None])[None]
    same_picture = (picture[:, :, None] == picture[:, None]) & soft[:, :, None]
    sliding = (causal | same_picture) & (place[None] > place[:, None] - WINDOW)[None]
    full = causal.expand(rows, length, length)
    return {"full_attention": full[:, None], "sliding_attention": sliding[:, None]}


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """In the place of ``Gemma4TextExperts.forward``."""
    dtype = computing_dtype(hidden_states)
    weights = spread_weights(top_k_index, top_k_weights, self.num_experts).to(dtype)
    matrices = self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
    return _dense_experts(hidden_states.to(dtype), weights, *matrices).to(hidden_states.dtype)


def _dense_experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """All experts on all tokens. ``x`` is ``[tokens, H]``, ``weights`` ``[tokens, experts]``."""
    experts, double, hidden = gate_up.shape
    both = (x @ gate_up.reshape(experts * double, hidden).t()).view(-1, experts, double)
    gate, up = both.chunk(2, -1)
    activated = F.gelu(gate, approximate="tanh") * up * weights[..., None]
    activated = activated.to(x.dtype).reshape(-1, experts * double // 2)
    return activated @ down.transpose(1, 2).reshape(experts * double // 2, hidden)
