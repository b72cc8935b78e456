"""A web page at ``/``: chat with the models that are served, see their memory and the plugins.

The page is plain files of this package. It needs no build, asks nobody but its own server,
and uses only what any other client may use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

api_version = (1, 0)


@hookimpl
def server_routes() -> list[BaseRoute]:
    """``/``, and what the page needs below ``/webui/``."""
    from darkbloom_webui._routes import page_routes

    return page_routes()
