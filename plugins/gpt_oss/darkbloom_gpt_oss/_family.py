"""The ``ModelFamily`` that this plugin adds. Importing it is cheap; MLX is imported by ``load``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import defer_package
from darkbloom_core.contracts import (
    ChatCodec,
    Device,
    LoadedModel,
    ModelDescription,
    Placement,
    Progress,
)
from darkbloom_gpt_oss._config import GptOssConfig, parse_config
from darkbloom_gpt_oss._shapes import memory_per_disk_byte

_CODE_FIELDS = ("auto_map", "model_file", "trust_remote_code")


class GptOss:
    """GPT-OSS, with whatever weights and configs are found in the wild."""

    name = "gpt-oss"
    version = version("darkbloom-gpt-oss")
    model_types = frozenset({"gpt_oss"})

    def describe(self, config: Mapping[str, Any], device: Device) -> ModelDescription:
        """Pure. Raises ``UnsupportedCheckpoint`` naming the field at fault."""
        parsed = parse_config(config)
        dtype = parsed.compute_dtype(device.kind)
        return ModelDescription(
            family=self.name,
            model_type=str(config.get("model_type", "")),
            context_tokens=parsed.context_tokens,
            vocab_size=parsed.vocab_size,
            hidden_size=parsed.hidden_size,
            layers=parsed.layers(device.kind),
            memory_per_disk_byte=memory_per_disk_byte(parsed, dtype),
            ignored_fields=parsed.ignored_fields,
            notes=tuple(_notes(parsed, device, dtype)),
            config=dict(config),
        )

    def codec(self, path: Path, description: ModelDescription) -> ChatCodec:
        """Raises ``CheckpointError`` naming the file that is missing or damaged."""
        from darkbloom_gpt_oss._codec import HarmonyCodec

        return HarmonyCodec(path)

    def load(
        self,
        path: Path,
        description: ModelDescription,
        placement: Placement,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Raises ``CheckpointError`` naming the file or the tensors at fault."""
        defer_package("mlx_lm")
        from darkbloom_gpt_oss._model import load_model

        config = parse_config(description.config or {})
        return load_model(path, description, config, placement, progress)

    def load_random(self, description: ModelDescription, placement: Placement) -> LoadedModel:
        """A model of random weights, for benchmarks."""
        defer_package("mlx_lm")
        from darkbloom_gpt_oss._random import random_model

        return random_model(description, parse_config(description.config or {}), placement)


def _notes(parsed: GptOssConfig, device: Device, dtype: str) -> list[str]:
    notes = []
    if dtype != parsed.dtype:
        notes.append(
            f"on {device.kind} this family computes in float32, so KV and what is not quantised take twice the"
            f" bytes of {parsed.dtype}"
        )
    if code := [name for name in _CODE_FIELDS if name in parsed.ignored_fields]:
        notes.append(f"{', '.join(code)}: code from a checkpoint is never run")
    return notes
