"""The table ``[options.ssd-tier]``. The text under an option is its documentation: docs/ssd.md lists it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from darkbloom_core.errors import SettingsError
from darkbloom_core.settings import DEFAULT_CONFIG
from darkbloom_ssd_tier._name import NAME

MIB = 1024**2
HOUR = 3600.0


class SsdOptions(BaseModel):
    """Sizes are bytes, times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    directory: Path | None = None
    """The folder, if not `tiers/ssd-tier` in `prefix.state_folder`; it may be on another disk."""

    bytes_limit: int | None = Field(default=None, ge=1)
    """The most bytes on disk, all models together, if `prefix.tier_bytes` does not say it; a tenth of the disk if not set."""

    free_bytes_floor: int | None = Field(default=None, ge=0)
    """How much of the disk must stay free; below, the cache shrinks. A tenth of the disk, but at most 20 GiB, if not set."""

    files_limit: int = Field(default=200_000, ge=1)
    """The most files, all models together."""

    ttl_seconds: float = Field(default=7 * 24 * HOUR, gt=0, allow_inf_nan=False)
    """How long a part stays after its last use."""

    write_bytes_per_day: int | None = Field(default=None, ge=0)
    """The most bytes written in any 24 hours, restarts included, all models together; a tenth of the disk if not set."""

    first_sight_share: float = Field(default=0.25, ge=0, le=1)
    """The part of these that may go to prompts which have not come back yet."""

    second_sight_seconds: float = Field(default=24 * HOUR, gt=0, allow_inf_nan=False)
    """How long a prompt is remembered, to know it when it comes back."""

    write_bytes_per_second: int = Field(default=400 * MIB, ge=1)
    """How fast is written, at most."""

    queue_bytes: int = Field(default=256 * MIB, ge=0)
    """The most bytes of parts that wait to be written, for each model; what comes beyond is dropped."""

    readers: int = Field(default=4, ge=1, le=64)
    """How many files are read at once."""

    fsync: bool = False
    """Whether a file is on the disk itself before it counts. Without, a power cut may cost parts, but none is ever wrong."""

    key_store: Literal["auto", "keyring", "file", "secret", "environment"] = "auto"
    """Where the key is: the system's keyring, a file that the tier makes, a file or a variable that you provide."""

    key_file: Path = DEFAULT_CONFIG.parent / "ssd-tier.key"
    """The file of `key_store = "file"` and `"secret"`."""

    key_variable: str = Field(default="SSD_TIER_KEY", min_length=1)
    """The environment variable of `key_store = "environment"`."""


def read_options(given: Mapping[str, Any]) -> SsdOptions:
    """Raises ``SettingsError`` that names the option which is unknown or wrong."""
    known = list(SsdOptions.model_fields)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise SettingsError(f"unknown option options.{NAME}.{name}: {meant}")
    try:
        return SsdOptions.model_validate(dict(given))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise SettingsError(f"options.{NAME}.{fault['loc'][0]}: {fault['msg']}") from error
