"""Two more ways to ask the same models: Anthropic's Messages API and OpenAI's Responses API.

Everything here goes through the public doors of the core: what these dialects do, a plugin
by anyone could do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from darkbloom_core.settings import Settings

api_version = (1, 0)


@hookimpl
def server_routes(settings: Settings) -> list[BaseRoute]:
    """``/v1/messages``, ``/v1/responses`` and what is below them."""
    from darkbloom_dialects._anthropic import anthropic_routes
    from darkbloom_dialects._options import read_options
    from darkbloom_dialects._responses import responses_routes

    return [*anthropic_routes(), *responses_routes(read_options(settings))]
