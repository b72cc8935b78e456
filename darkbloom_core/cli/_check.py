"""What a check of the doctor found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. ``advice`` says what to do; ``facts`` are the numbers, for a program."""

    name: str
    state: State
    found: str
    advice: str | None = None
    facts: Mapping[str, object] | None = None
