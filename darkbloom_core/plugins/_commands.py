"""Let a plugin add to the command line: what it adds is taken whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def add_commands(app: typer.Typer, fill: Callable[[typer.Typer], object]) -> None:
    """Let ``fill`` add to an empty app, then move that to ``app``.

    Raises ``ValueError`` if it takes a name that ``app`` has, or sets a callback.
    """
    import typer

    addition = typer.Typer()
    fill(addition)
    if addition.registered_callback is not None:
        raise ValueError("a plugin cannot set the callback of the command line: add a group with its own")
    if taken := sorted(_names(addition) & _names(app)):
        raise ValueError(f"there is a command {taken[0]} already: choose another name")
    app.registered_commands += addition.registered_commands
    app.registered_groups += addition.registered_groups


def _names(app: typer.Typer) -> set[str]:
    """The words that ``app`` knows as its first argument."""
    from typer.main import get_command_name, solve_typer_info_defaults

    names: set[str] = set()
    for command in app.registered_commands:
        if command.name:
            names.add(command.name)
        elif command.callback is not None:
            names.add(get_command_name(command.callback.__name__))
    for group in app.registered_groups:
        if name := solve_typer_info_defaults(group).name:
            names.add(name)
        elif group.typer_instance is not None:  # a group without a name adds its commands to ours
            names |= _names(group.typer_instance)
    return names
