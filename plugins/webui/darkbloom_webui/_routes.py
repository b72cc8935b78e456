"""Serves the page: its files, read once and kept in memory, and what the API does not tell it.

Always true: a browser that keeps to the headers sent here runs no script, loads no picture
and talks to no server but this one's, whatever a model or a picture's name contains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from darkbloom_core.server import OpenRoute, plugin_reports

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Scripts and styles are files of this server; ``data:`` is for the pictures that a user adds.
The last two lines make a browser refuse to read any text as HTML."""

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

PAGE = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page. ``etag`` changes with every byte of it."""

    content: bytes
    content_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """All files of the page by name."""
    found: dict[str, PageFile] = {}
    for entry in sorted((files(__package__) / "page").iterdir(), key=lambda entry: entry.name):
        content = entry.read_bytes()
        ending = entry.name[entry.name.rindex(".") :]
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[entry.name] = PageFile(content, CONTENT_TYPES[ending], etag)
    return found


def page_routes() -> list[BaseRoute]:
    """The page at ``/``, its other files and the list of plugins below ``/webui/``."""
    routes: list[BaseRoute] = [
        OpenRoute("/" if name == PAGE else f"/webui/{name}", _answers_with(file), methods=["GET"])
        for name, file in page_files().items()
    ]
    return [*routes, Route("/webui/plugins", _plugins, methods=["GET"])]


def _answers_with(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    # "no-cache": a browser keeps the file and asks each time whether it is still the same,
    # so that an upgrade shows at once and its files are never mixed with older ones.
    headers = {**HEADERS, "etag": file.etag, "cache-control": "no-cache"}

    async def answer(request: Request) -> Response:
        if has_etag(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.content_type})

    return answer


def has_etag(if_none_match: str, etag: str) -> bool:
    """Whether the header names ``etag``, compared weakly as RFC 9110, section 13.1.2, says."""
    named = [entry.strip().removeprefix("W/") for entry in if_none_match.split(",")]
    return etag in named or named == ["*"]


async def _plugins(request: Request) -> JSONResponse:
    """What is installed and what became of it, as `darkbloom plugins --json` tells it."""
    found = [{**asdict(report), "failed": report.failed} for report in plugin_reports(request.app)]
    return JSONResponse({"plugins": found}, headers={"cache-control": "no-store"})
