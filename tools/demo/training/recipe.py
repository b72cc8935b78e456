"""What differs between the two checkpoints, so that training, export and evaluation are written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo.training.source import word_pieces

REPOSITORY = Path(__file__).parents[3]
CHECKPOINTS = REPOSITORY / "plugins/demo/darkbloom_demo/checkpoints"
"""The delivered checkpoints, whose tokenizers and chat templates are kept."""


class Recipe(ABC):
    """One checkpoint. ``name`` is its folder among the delivered ones."""

    name: ClassVar[str]
    learning_rate: ClassVar[float] = 2e-3
    loader_seed: ClassVar[int]
    attention: ClassVar[str]
    """How ``transformers`` attends while the checkpoint is judged."""

    @property
    def folder(self) -> Path:
        return CHECKPOINTS / self.name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """What invented words are made of: tokens of both checkpoints, so that both learn the same words."""
        return word_pieces(sorted(CHECKPOINTS.glob("*/tokenizer.json")))

    @property
    @abstractmethod
    def shapes(self) -> int:
        """How many shapes of batch there are."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Endless batches: ids, labels, and what else ``losses`` takes."""

    @abstractmethod
    def new_model(self) -> Any:
        """The untrained model, the same every time."""

    @abstractmethod
    def fast(self, model: Any) -> AbstractContextManager[None]:
        """Inside, ``model`` computes the same as always in a way that suits training."""

    @abstractmethod
    def losses(self, model: Any, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy, and how unevenly the experts are used."""

    @abstractmethod
    def uses_muon(self, name: str, parameter: Tensor) -> bool:
        """Whether Muon moves this parameter; AdamW moves the others."""

    @abstractmethod
    def held_out_accuracy(self, model: Any, device: torch.device, dialogues: int) -> dict[str, float]:
        """Share of held-out dialogues, for each task, in which every token of the model's is the likeliest.

        That is the share of greedy answers that are exactly right.
        """

    @abstractmethod
    def answers_accuracy(self, model: Any, dialogues: int) -> dict[str, float]:
        """The same of the model as its users run it: no fast path, and everything read by the reference's own code."""

    @abstractmethod
    def write_extras(self, folder: Path) -> None:
        """What belongs to the checkpoint besides weights, config, tokenizer and chat template."""

    @property
    @abstractmethod
    def tokenizer_config(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def generation_config(self) -> Any: ...
