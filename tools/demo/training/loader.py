"""Batches made by worker processes while the model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.demo.training.runner import Batch

MakeBatches = Callable[[int], Iterator[tuple[NDArray[Any], ...]]]
"""Endless batches from a seed."""


class _Stream(IterableDataset[Batch]):
    def __init__(self, make: MakeBatches, seed: int) -> None:
        self._make = make
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        for arrays in self._make(self._seed * 1000 + number):
            yield tuple(torch.from_numpy(each) for each in arrays)


def load(make: MakeBatches, seed: int, workers: int) -> Iterator[Batch]:
    """Endless batches from ``workers`` processes (0: this one), each with a seed of its own.

    Memory is not pinned: the thread that pins would call CUDA while graphs are captured.
    """
    ahead = 8 if workers else None
    loader = DataLoader(_Stream(make, seed), batch_size=None, num_workers=workers, prefetch_factor=ahead)
    return iter(loader)
