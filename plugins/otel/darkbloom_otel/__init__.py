"""OpenTelemetry for darkbloom: a span for every request, metrics, and Prometheus text at ``/metrics``.

No prompt, no output and no other content ever leaves through here: the events of the core
hold none. Nothing is global: several servers in one process have separate metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from darkbloom_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from darkbloom_core.contracts import TelemetrySink
    from darkbloom_core.settings import Settings

api_version = (1, 0)

NAME = "otel"


@hookimpl
def telemetry_sinks(settings: Settings) -> list[TelemetrySink]:
    """One sink with providers of its own."""
    from darkbloom_otel._options import read_options
    from darkbloom_otel._sink import open_sink

    return [open_sink(read_options(settings), settings.server.host, settings.server.port)]


@hookimpl
def server_routes(settings: Settings) -> list[BaseRoute]:
    """``/metrics`` of the server's own sink."""
    from darkbloom_otel._options import read_options
    from darkbloom_otel._routes import metrics_route

    read_options(settings)
    return [metrics_route()]
