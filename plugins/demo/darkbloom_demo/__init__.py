"""Two tiny trained checkpoints, a command that shows them at work, and prompts that they answer right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl
from darkbloom_demo._prompts import CheckedPrompt, checked_prompts

if TYPE_CHECKING:
    import typer

__all__ = ["CheckedPrompt", "checked_prompts"]

api_version = (1, 0)

_FOLDER = Path(__file__).parent / "checkpoints"


@hookimpl
def checkpoints() -> Mapping[str, Path]:
    """Both, below ``demo/``."""
    return {"demo/gpt-oss": _FOLDER / "gpt-oss", "demo/gemma4": _FOLDER / "gemma4"}


@hookimpl
def cli_commands(app: typer.Typer) -> None:
    """``darkbloom demo``."""
    from darkbloom_demo._command import add_to

    add_to(app)
