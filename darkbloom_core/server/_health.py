"""Health: whether the process answers, and whether it would serve a request now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from darkbloom_core.plugins import PluginReport
from darkbloom_core.server._generation import GenerationService

if TYPE_CHECKING:
    from darkbloom_core.slots import Slot

PluginReports = Callable[[], Sequence[PluginReport]]
SinkFailures = Callable[[], Mapping[str, int]]


def health_routes(
    service: GenerationService, plugin_reports: PluginReports, sink_failures: SinkFailures
) -> list[BaseRoute]:
    """``/health/live`` and ``/health/ready``."""

    async def live(_: Request) -> JSONResponse:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> JSONResponse:
        body = readiness(service, plugin_reports(), sink_failures())
        return JSONResponse(body, status_code=200 if body["status"] == "ready" else 503)

    return [
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
    ]


def readiness(
    service: GenerationService, plugins: Sequence[PluginReport], sink_failures: Mapping[str, int]
) -> dict[str, Any]:
    """Ready means that at least one slot serves and its engine makes progress, or that all models wait to be asked for.

    Plugins and sinks appear only if they failed.
    """
    slots = [_slot_body(slot) for slot in service.slots.slots()]
    serving = any(slot["state"] == "serving" and slot["healthy"] for slot in slots)
    serving = serving or bool(service.slots.known() and not slots)
    status = "draining" if service.draining else "ready" if serving else "not ready"
    return {
        "status": status,
        "slots": slots,
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
