"""Puts the server together from its routes and the layers around them."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute

from darkbloom_core.contracts import TelemetrySink
from darkbloom_core.plugins import PluginReport
from darkbloom_core.server._edge import Edge, RequestIds
from darkbloom_core.server._gate import Gate
from darkbloom_core.server._health import PluginReports, health_routes
from darkbloom_core.server._keys import KeyRing
from darkbloom_core.server._limits import KeyLimits
from darkbloom_core.server._openai import openai_routes
from darkbloom_core.server._pages import Pages
from darkbloom_core.server._service import GenerationService
from darkbloom_core.settings import Settings, read_keys
from darkbloom_core.telemetry import SinkEmitter

if TYPE_CHECKING:
    from darkbloom_core.slots import SlotManager

SHOWN_PATH_CHARACTERS = 200


def create_app(
    slots: SlotManager,
    settings: Settings,
    emitter: SinkEmitter,
    plugin_routes: Sequence[BaseRoute] = (),
    plugin_reports: PluginReports = tuple,
) -> Starlette:
    """The ASGI application. The core's own routes win over ``plugin_routes`` of the same path.

    Routes of plugins reach the models through ``generation_service(request.app)``, and
    their own sinks through ``telemetry_sinks(request.app)``. With API keys in ``settings``
    all routes need one, but for each that is an ``OpenRoute``. Raises ``SettingsError`` if
    the keys cannot be read.
    """
    keys = KeyRing(read_keys(settings))
    service = GenerationService(slots, settings, emitter)
    routes = [
        *openai_routes(service),
        *health_routes(service, plugin_reports, lambda: emitter.failures),
        *plugin_routes,
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestIds),
            *_cors(settings.server.cors_origins),
            Middleware(Edge, emitter=emitter, body_bytes_limit=settings.server.body_bytes_limit),
            Middleware(
                Gate,
                routes=routes,
                keys=keys,
                limits=KeyLimits(settings.server),
                pages=Pages(settings.server.cors_origins),
            ),
        ],
        exception_handlers={HTTPException: _leave_to_the_edge},
    )
    app.router.redirect_slashes = False
    app.state.generation_service = service
    app.state.telemetry_sinks = emitter.sinks
    app.state.plugin_reports = plugin_reports
    app.state.needs_key = bool(keys)
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Pages of these origins may read answers, errors too; keys are headers, so no cookie is let in."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
            allow_private_network=True,
        )
    ]


def generation_service(app: Starlette) -> GenerationService:
    """What the routes of ``app`` generate through."""
    service = app.state.generation_service
    assert isinstance(service, GenerationService)
    return service


def telemetry_sinks(app: Starlette) -> tuple[TelemetrySink, ...]:
    """The sinks of the server that ``app`` is, so that a plugin's route finds the plugin's own sink."""
    sinks: tuple[TelemetrySink, ...] = app.state.telemetry_sinks
    return sinks


def plugin_reports(app: Starlette) -> tuple[PluginReport, ...]:
    """What became of each installed plugin, as it is now, in the process that serves ``app``."""
    return tuple(app.state.plugin_reports())


async def _leave_to_the_edge(request: Request, error: Exception) -> NoReturn:
    """Pass ``error`` on, saying which path it is about if nobody has said anything yet."""
    assert isinstance(error, HTTPException)
    if error.status_code not in (404, 405) or error.detail != HTTPStatus(error.status_code).phrase:
        raise error
    detail = f"{error.detail}: {request.method} {request.url.path[:SHOWN_PATH_CHARACTERS]}"
    raise HTTPException(error.status_code, detail, error.headers)
