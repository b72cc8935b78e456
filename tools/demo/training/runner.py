"""Runs training steps, as CUDA graphs where there is a GPU: one graph for each shape of batch.

Launching the kernels of these tiny models one by one would take longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tools.demo.training.optimizer import Optimizer

Batch = tuple[Tensor, ...]

BALANCE_WEIGHT = 0.01
"""Of the loss that keeps experts evenly used."""


class Runner:
    """``forward`` gives a batch's loss and its balance loss, both scalars."""

    def __init__(
        self, forward: Callable[..., tuple[Tensor, Tensor]], optimizer: Optimizer, device: torch.device
    ) -> None:
        self._forward = forward
        self._optimizer = optimizer
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._graphs: dict[tuple[tuple[int, ...], ...], tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self._step_graph: torch.cuda.CUDAGraph | None = None
        # Outside the graphs' pool, where a later graph would overwrite them.
        self.loss = torch.zeros((), device=device)
        self.balance = torch.zeros((), device=device)

    def step(self, batch: Batch, rate_factor: float) -> None:
        """One training step; afterwards ``loss`` and ``balance`` are its losses."""
        self._optimizer.set_rate(rate_factor)
        if not self._on_gpu:
            self._backward(batch)
            self._optimizer.step()
            return
        shapes = tuple(tuple(each.shape) for each in batch)
        if shapes not in self._graphs:
            static = tuple(each.to(self._device) for each in batch)
            self._graphs[shapes] = (self._capture(lambda: self._backward(static)), static)
        if self._step_graph is None:
            self._step_graph = self._capture_step()
        graph, static = self._graphs[shapes]
        for held, each in zip(static, batch, strict=True):
            held.copy_(each, non_blocking=True)
        graph.replay()
        self._step_graph.replay()

    def _backward(self, batch: Batch) -> None:
        self._optimizer.zero_gradients()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._on_gpu, cache_enabled=False):
            loss, balance = self._forward(*batch)
        (loss + BALANCE_WEIGHT * balance).backward()
        self.loss.copy_(loss.detach())
        self.balance.copy_(balance.detach())

    def _capture_step(self) -> torch.cuda.CUDAGraph:
        """The optimiser's step. Running it in before capturing must not move the weights."""
        rates = self._optimizer.rate, self._optimizer.adam_rate
        kept = [rate.clone() for rate in rates]
        for rate in rates:
            rate.zero_()
        graph = self._capture(self._optimizer.step)
        for rate, value in zip(rates, kept, strict=True):
            rate.copy_(value)
        return graph

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local, since the threads of the data loader may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph
