"""An encrypted prefix cache on disk: what a prompt's beginning cost to compute outlives the process.

Nothing in its folder can be read, or be tested for a guess, without the installation's key;
without a key nothing is kept. ``darkbloom ssd`` shows, checks and wipes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

    from darkbloom_core.contracts import CacheTierFactory

api_version = (1, 0)


@hookimpl
def cache_tiers() -> list[CacheTierFactory]:
    """One, called ``ssd-tier``; ``prefix.tiers`` of the settings must name it."""
    from darkbloom_ssd_tier._tier import SsdTierFactory

    return [SsdTierFactory()]


@hookimpl
def cli_commands(app: typer.Typer) -> None:
    """``darkbloom ssd``."""
    from darkbloom_ssd_tier._commands import add_to

    add_to(app)
