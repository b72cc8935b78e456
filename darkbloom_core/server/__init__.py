"""HTTP: OpenAI chat, completions and models; health; server-sent events; one table from errors to answers."""

from darkbloom_core.server._app import create_app, generation_service, plugin_reports, telemetry_sinks
from darkbloom_core.server._bodies import read_json
from darkbloom_core.server._context import ClientWatch, RequestContext, request_context
from darkbloom_core.server._errors import ErrorAnswer, error_answer
from darkbloom_core.server._gate import OpenRoute, WritesErrors
from darkbloom_core.server._generation import Generation
from darkbloom_core.server._requests import AnswerRequest, AskedMedia, SamplingOverrides, asked_media
from darkbloom_core.server._run import BackgroundServer, check_address, serve
from darkbloom_core.server._service import GenerationService

__all__ = [
    "AnswerRequest",
    "AskedMedia",
    "BackgroundServer",
    "ClientWatch",
    "ErrorAnswer",
    "Generation",
    "GenerationService",
    "OpenRoute",
    "RequestContext",
    "SamplingOverrides",
    "WritesErrors",
    "asked_media",
    "check_address",
    "create_app",
    "error_answer",
    "generation_service",
    "plugin_reports",
    "read_json",
    "request_context",
    "serve",
    "telemetry_sinks",
]
