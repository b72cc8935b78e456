"""Muon for the hidden matrices, AdamW for everything else, clipped by the global norm.

All state lives on the device and no step reads a value, so that a step can be part of a
CUDA graph. Muon: https://kellerjordan.github.io/posts/muon, with its update scaled to the
size of AdamW's as in https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.02
CLIP = 1.0
FIRST_DECAY, SECOND_DECAY = 0.9, 0.98
"""Of AdamW's two moments."""
MOMENTUM = 0.95
"""Of Muon."""
EPSILON = 1e-8


def orthogonalized(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices to a stack ``[n, rows, columns]``, about: five Newton-Schulz steps."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Optimizer:
    """``uses_muon`` says of a parameter's name and value whether Muon moves it."""

    def __init__(
        self, model: nn.Module, uses_muon: Callable[[str, Tensor], bool], learning_rate: float
    ) -> None:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        parameters = [each for _, each in named]
        for each in parameters:
            each.grad = torch.zeros_like(each)  # kept for good: graphs write into the same memory
        self.gradients = [each.grad for each in parameters if each.grad is not None]
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, each in named:
            if uses_muon(name, each):
                by_shape.setdefault(tuple(each.shape[-2:]), []).append(each)
        self._muon = [(group, [torch.zeros_like(each) for each in group]) for group in by_shape.values()]
        moved_by_muon = {id(each) for group in by_shape.values() for each in group}
        self._adam = [each for each in parameters if id(each) not in moved_by_muon]
        self._first = [torch.zeros_like(each) for each in self._adam]
        self._second = [torch.zeros_like(each) for each in self._adam]
        self._learning_rate = learning_rate
        self._steps = 0
        device = parameters[0].device
        self.rate = torch.zeros((), device=device)
        self.adam_rate = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        """Of all gradients, before clipping."""

    def set_rate(self, factor: float) -> None:
        """Begin a step at ``factor`` of the learning rate."""
        self._steps += 1
        rate = self._learning_rate * factor
        first, second = 1 - FIRST_DECAY**self._steps, 1 - SECOND_DECAY**self._steps
        self.rate.fill_(rate)
        self.adam_rate.fill_(rate * math.sqrt(second) / first)

    def zero_gradients(self) -> None:
        torch._foreach_zero_(self.gradients)

    @torch.no_grad()
    def step(self) -> None:
        norm = torch.stack(torch._foreach_norm(self.gradients)).norm()
        self.norm.copy_(norm)
        torch._foreach_mul_(self.gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        for group, momenta in self._muon:
            self._step_muon(group, momenta)
        self._step_adam()

    def _step_muon(self, group: list[nn.Parameter], momenta: list[Tensor]) -> None:
        gradients = [each.grad for each in group if each.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's look ahead
        rows, columns = group[0].shape[-2:]
        stacked = torch.cat([each.reshape(-1, rows, columns) for each in ahead])
        updates = orthogonalized(stacked) * (0.2 * math.sqrt(max(rows, columns)) * self.rate)
        torch._foreach_mul_(group, 1 - self.rate * WEIGHT_DECAY)
        pieces = updates.split([each.numel() // (rows * columns) for each in group])
        torch._foreach_sub_(group, [piece.view_as(each) for piece, each in zip(pieces, group, strict=True)])

    def _step_adam(self) -> None:
        """Without weight decay: these are embeddings, norms, biases and routers."""
        gradients = [each.grad for each in self._adam if each.grad is not None]
        torch._foreach_lerp_(self._first, gradients, 1 - FIRST_DECAY)
        torch._foreach_mul_(self._second, SECOND_DECAY)
        torch._foreach_addcmul_(self._second, gradients, gradients, 1 - SECOND_DECAY)
        divisors = torch._foreach_sqrt(self._second)
        torch._foreach_add_(divisors, EPSILON)
        updates = torch._foreach_div(self._first, divisors)
        torch._foreach_mul_(updates, self.adam_rate)
        torch._foreach_sub_(self._adam, updates)
