"""``/metrics``: the metrics of the server that answers, in the format of Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from darkbloom_core.errors import Unavailable
from darkbloom_core.server import telemetry_sinks
from darkbloom_otel._sink import OtelSink


def metrics_route() -> Route:
    """The route; it finds its sink through the application that it runs in."""
    return Route("/metrics", _metrics, methods=["GET"])


def _metrics(request: Request) -> Response:
    """Not a coroutine: the server runs it in a thread, so that a scrape holds up no stream."""
    sink = next((sink for sink in telemetry_sinks(request.app) if isinstance(sink, OtelSink)), None)
    if sink is None:
        raise Unavailable("this server has no metrics: the plugin otel gave no sink, see /health/ready")
    body, content_type = sink.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
