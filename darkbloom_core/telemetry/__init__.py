"""Where the core's events go: to every sink, and no fault of a sink comes back."""

from darkbloom_core.telemetry._emitter import SinkEmitter

__all__ = ["SinkEmitter"]
