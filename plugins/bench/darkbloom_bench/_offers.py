"""What a family may offer to benchmarks. Not part of the core's contract: without it a family serves as well.

``ComparableModel`` makes ``--against mlx-lm`` possible, ``RandomFamily`` makes ``--shape``
and ``--random`` possible.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from darkbloom_core.contracts import LoadedModel, ModelDescription, Placement


@runtime_checkable
class ComparableModel(Protocol):
    """A loaded model that can also be had as a module of mlx-lm."""

    def mlx_lm_model(self) -> Any:
        """The same weights in mlx-lm's own class, laid out as mlx-lm holds them when it loads a checkpoint.

        Arrays are shared where the layout is the same. Rotary frequencies are those that
        the family itself computes, so that both sides produce the same tokens. Called on
        the thread that loaded the model; nothing needs to be evaluated.
        """
        ...


@runtime_checkable
class RandomFamily(Protocol):
    """A family that can make a model without a checkpoint."""

    def load_random(self, description: ModelDescription, placement: Placement) -> LoadedModel:
        """The model that ``description`` describes, with random weights made on the device.

        Shapes, dtypes and quantisation are those that ``load`` would give a checkpoint with
        the described config. The weights are such that hidden states neither vanish nor
        overflow; nothing else is promised of them.
        """
        ...
