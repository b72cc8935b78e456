"""What both models' mixtures of experts share while training: every expert on every token, and even use.

For a few small experts two plain matrix products are faster than gathering, and their
shapes do not depend on the routing, which CUDA graphs need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def spread_weights(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """``[tokens, experts]``: the weight of each expert, zero if it was not chosen.

    ``chosen`` and ``weights`` are ``[tokens, k]``.
    """
    zeros = torch.zeros(chosen.shape[0], experts, device=chosen.device, dtype=weights.dtype)
    return zeros.scatter(1, chosen, weights)


def computing_dtype(hidden: Tensor) -> torch.dtype:
    """bfloat16 under autocast, which does not reach into functions of our own."""
    return torch.bfloat16 if torch.is_autocast_enabled("cuda") else hidden.dtype


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router did in the last forward pass.

    ``probabilities`` is ``[tokens, experts]`` float32, ``chosen`` ``[tokens, k]``.
    """

    probabilities: Tensor
    chosen: Tensor


def balance_loss(routings: Iterable[Routing], is_real: Tensor) -> Tensor:
    """Switch Transformer's load-balancing loss (https://arxiv.org/abs/2101.03961), the mean over layers.

    1 is even use. ``is_real`` is ``[tokens]`` float32: 0 for padding.
    """
    share = (is_real / is_real.sum())[:, None]
    losses = []
    for routing in routings:
        experts, chosen = routing.probabilities.shape[1], routing.chosen.shape[1]
        hits = torch.zeros_like(routing.probabilities).scatter(1, routing.chosen, 1.0)
        used = (hits.float() * share).sum(0) / chosen
        wanted = (routing.probabilities * share).sum(0)
        losses.append(experts * (used * wanted).sum())
    return torch.stack(losses).mean()
