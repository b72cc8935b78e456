"""The family's door: what ``darkbloom_gemma4`` offers to the core."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import defer_package, read_config, read_stop_ids
from darkbloom_core.contracts import ChatCodec, Device, LoadedModel, ModelDescription, Placement, Progress
from darkbloom_gemma4._config import FAMILY, MODEL_TYPES, Gemma4Config, describe


class Gemma4Family:
    """Gemma 4 in all published sizes: text, pictures and videos in, text out."""

    name = FAMILY
    model_types = frozenset(MODEL_TYPES)

    @property
    def version(self) -> str:
        return version("darkbloom-gemma4")

    def describe(self, config: Mapping[str, Any], device: Device) -> ModelDescription:
        return describe(config, device)

    def codec(self, path: Path, description: ModelDescription) -> ChatCodec:
        from darkbloom_gemma4._codec import Gemma4Codec

        return Gemma4Codec(path)

    def load(
        self,
        path: Path,
        description: ModelDescription,
        placement: Placement,
        progress: Progress | None = None,
    ) -> LoadedModel:
        config = _understood(description)
        from darkbloom_gemma4._weights import open_tensors

        tensors = open_tensors(path, config)
        stop_ids = _stop_ids(path)
        defer_package("mlx_lm")
        from darkbloom_gemma4._model import LoadedGemma4
        from darkbloom_gemma4._processor import read_processor

        processor = None if config.vision is None else read_processor(path, config.vision)
        arrays = tensors.load(progress)
        return LoadedGemma4(description, config, arrays, tensors.schemes, stop_ids, processor)

    def load_random(self, description: ModelDescription, placement: Placement) -> LoadedModel:
        """A model of random weights, for benchmarks."""
        config = _understood(description)
        defer_package("mlx_lm")
        from darkbloom_gemma4._random import random_model

        return random_model(description, config)


def _understood(description: ModelDescription) -> Gemma4Config:
    config = (description.config or {}).get("model")
    if not isinstance(config, Gemma4Config):
        raise TypeError("the description is not one that this family made")
    return config


def _stop_ids(path: Path) -> frozenset[int]:
    from darkbloom_gemma4._tokens import STOP_NAMES, read_tokenizer

    tokenizer = read_tokenizer(path)
    config = read_config(path)
    text_config = config.get("text_config")
    places = [config, text_config] if isinstance(text_config, dict) else [config]
    return frozenset().union(*(read_stop_ids(path, place, tokenizer, STOP_NAMES) for place in places))
