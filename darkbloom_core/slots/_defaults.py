"""What a request gets when it says nothing: the checkpoint's own generation config, else documented defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint import read_generation_config
from darkbloom_core.engine import SamplingParams
from darkbloom_core.errors import CheckpointError


def sampling_defaults(path: Path) -> SamplingParams:
    """``generation_config.json`` of the checkpoint at ``path`` as sampling parameters.

    ``do_sample: false`` means temperature 0. What the file does not say is as in OpenAI's
    API: temperature 1 and no filter. Raises ``CheckpointError`` naming a field that is no number.
    """
    config = read_generation_config(path)
    greedy = config.get("do_sample") is False
    return SamplingParams(
        temperature=0.0 if greedy else _number(config, "temperature", 1.0, path),
        top_k=int(_number(config, "top_k", 0, path)),
        top_p=_number(config, "top_p", 1.0, path),
        min_p=_number(config, "min_p", 0.0, path),
        repetition_penalty=_number(config, "repetition_penalty", 1.0, path),
    )


def _number(config: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{path / 'generation_config.json'}: {name} is {value!r}, not a number")
    return value
