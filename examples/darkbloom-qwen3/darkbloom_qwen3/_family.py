"""The family's door. Each method answers one question; the work is done in the file named beside it.

Read the files in this order: ``_config`` (what is it?), ``_model`` (how is it run?),
``_weights`` (how is it loaded?), ``_codec`` and ``_parser`` (how is it talked to?).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import TextTokenizer, read_stop_ids
from darkbloom_core.contracts import ChatCodec, Device, LoadedModel, ModelDescription, Placement, Progress
from darkbloom_qwen3._config import describe, read_config

# What may end an answer besides the ids that the checkpoint's own files name.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")


class Qwen3Family:
    """Dense Qwen3 of every size. It has no state: one object serves every checkpoint.

    It matches ``darkbloom_core.contracts.ModelFamily`` by having its members; there is
    nothing to inherit from.
    """

    name = "qwen3"
    model_types = frozenset({"qwen3"})  # what ``model_type`` in config.json may say for us to read it

    @property
    def version(self) -> str:
        """Another version may compute other bits, so cached work of this one is not used by it."""
        return version("darkbloom-qwen3")

    def describe(self, config: Mapping[str, Any], device: Device) -> ModelDescription:
        """What a checkpoint is, from its config alone: ``_config``."""
        return describe(config)

    def codec(self, path: Path, description: ModelDescription) -> ChatCodec:
        """How it is talked to: ``_codec`` and ``_parser``."""
        from darkbloom_qwen3._codec import Qwen3Codec

        return Qwen3Codec(path)

    def load(
        self,
        path: Path,
        description: ModelDescription,
        placement: Placement,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Weights into memory, ready to run: ``_weights`` and ``_model``."""
        # MLX is imported by these two, so only once something is really loaded.
        from darkbloom_qwen3._model import LoadedQwen3
        from darkbloom_qwen3._weights import load_network

        assert description.config is not None  # describe put it there
        config = read_config(description.config)
        network = load_network(path, config, progress)
        stop_ids = read_stop_ids(path, description.config, TextTokenizer(path), _END_TOKENS)
        return LoadedQwen3(description, config, network, stop_ids)
