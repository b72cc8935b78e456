"""Health: whether the process answers, whether it would serve a request now, and how much more it could take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from darkbloom_core.plugins import PluginReport
from darkbloom_core.server._context import request_context
from darkbloom_core.server._gate import OpenRoute
from darkbloom_core.server._service import GenerationService

if TYPE_CHECKING:
    from darkbloom_core.slots import Slot

PluginReports = Callable[[], Sequence[PluginReport]]
SinkFailures = Callable[[], Mapping[str, int]]


def health_routes(
    service: GenerationService, plugin_reports: PluginReports, sink_failures: SinkFailures
) -> list[BaseRoute]:
    """``/health/live``, ``/health/ready`` and ``/v1/capacity``; without a key readiness is only a status."""

    async def live(_: Request) -> JSONResponse:
        return JSONResponse({"status": "live"})

    async def ready(request: Request) -> JSONResponse:
        status = server_status(service)
        body: dict[str, Any] = {"status": status}
        if not request_context(request.scope).anonymous:
            body |= readiness(service, plugin_reports(), sink_failures())
        return JSONResponse(body, status_code=200 if status == "ready" else 503)

    async def capacity(_: Request) -> JSONResponse:
        slots = [asdict(slot) for slot in service.slots.capacity()]
        return JSONResponse({"object": "capacity", "status": server_status(service), "slots": slots})

    return [
        OpenRoute("/health/live", live, methods=["GET"]),
        OpenRoute("/health/ready", ready, methods=["GET"]),
        Route("/v1/capacity", capacity, methods=["GET"]),
    ]


def server_status(service: GenerationService) -> Literal["ready", "not ready", "draining"]:
    """Ready means that at least one slot serves and its engine makes progress, or that all models wait to be asked for."""
    slots = service.slots.slots()
    serving = any(slot.state == "serving" and slot.engine.status().healthy for slot in slots)
    serving = serving or bool(service.slots.known() and not slots)
    return "draining" if service.draining else "ready" if serving else "not ready"


def readiness(
    service: GenerationService, plugins: Sequence[PluginReport], sink_failures: Mapping[str, int]
) -> dict[str, Any]:
    """The slots, and what failed: plugins and sinks appear only if they did."""
    return {
        "slots": [_slot_body(slot) for slot in service.slots.slots()],
        "failed_plugins": [
            {
                "name": report.name,
                "distribution": report.distribution,
                "state": report.state,
                "reason": report.reason,
            }
            for report in plugins
            if report.failed
        ],
        "failed_sinks": [{"name": name, "failures": count} for name, count in sink_failures.items() if count],
    }


def _slot_body(slot: Slot) -> dict[str, Any]:
    status = slot.engine.status()
    return {
        "model": slot.name,
        "state": slot.state,
        "activity": slot.activity,
        "healthy": status.healthy,
        "running": status.running,
        "waiting": status.waiting,
    }
