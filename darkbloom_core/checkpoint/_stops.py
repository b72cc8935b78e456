"""Which tokens end an output: what the config, the generation config and the tokenizer say, together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from darkbloom_core.checkpoint._config import read_generation_config
from darkbloom_core.checkpoint._tokenizer import TextTokenizer
from darkbloom_core.errors import CheckpointError


def read_stop_ids(
    path: Path, config: Mapping[str, Any], tokenizer: TextTokenizer, names: Iterable[str]
) -> frozenset[int]:
    """The union of ``eos_token_id`` of ``config`` and of ``generation_config.json``, the tokenizer's
    end-of-sequence token, and those of the control tokens ``names`` that the tokenizer has.

    Raises ``CheckpointError`` naming the file if an ``eos_token_id`` is not an id.
    """
    ids = _ids(config.get("eos_token_id"), path / "config.json")
    ids |= _ids(read_generation_config(path).get("eos_token_id"), path / "generation_config.json")
    for name in (tokenizer.special_tokens.get("eos_token"), *names):
        token = tokenizer.control_id(name) if name else None
        if token is not None:
            ids.add(token)
    return frozenset(ids)


def _ids(value: object, file: Path) -> set[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for each in values:
        if not isinstance(each, int) or isinstance(each, bool) or each < 0:
            raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
    return set(values)
