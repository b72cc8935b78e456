"""Qwen3 for darkbloom. This module is the plugin: its hooks tell the core what the package adds.

It is imported whenever ``darkbloom`` starts, even for ``--help``. So nothing heavy is
imported here: hooks import what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from darkbloom_core.contracts import ModelFamily

# The contract that this package was written for: darkbloom_core.contracts.API_VERSION of that day.
api_version = (1, 0)


@hookimpl
def model_families() -> Sequence[ModelFamily]:
    """The one family of this package."""
    from darkbloom_qwen3._family import Qwen3Family

    return [Qwen3Family()]
