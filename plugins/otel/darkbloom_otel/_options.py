"""The table ``[options.otel]`` of the settings."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from darkbloom_core.errors import SettingsError

if TYPE_CHECKING:
    from darkbloom_core.settings import Settings


@dataclass(frozen=True, slots=True)
class OtelOptions:
    """``endpoint`` is the base URL of an OTLP/HTTP collector, such as ``http://127.0.0.1:4318``.

    Without one, spans and metrics are exported only if the environment names a collector
    in the standard variables of OpenTelemetry.
    """

    endpoint: str | None = None


def read_options(settings: Settings) -> OtelOptions:
    """Raises ``SettingsError`` that names the option which is unknown or wrong."""
    given = settings.options_of("otel")
    known = [field.name for field in fields(OtelOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
            raise SettingsError(f"unknown option options.otel.{name}: {meant}")
    endpoint = given.get("endpoint")
    if endpoint is None:
        return OtelOptions()
    if not isinstance(endpoint, str) or not endpoint.startswith(("http://", "https://")):
        raise SettingsError(f"options.otel.endpoint must start with http:// or https://, not {endpoint!r}")
    return OtelOptions(endpoint.rstrip("/"))
