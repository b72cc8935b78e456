"""What is installed: plugins and the catalogue of families, from one pass over the packages' metadata.

Nothing is imported here, and one package with damaged metadata hides no other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

logger = logging.getLogger("darkbloom.plugins")

PLUGIN_GROUP = "darkbloom"
CATALOGUE_GROUP = "darkbloom.catalogue"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed plugin, not imported yet. ``value`` is the entry point's text, None if unreadable."""

    name: str
    value: str | None
    distribution: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Installed:
    """``candidates`` are in order of name, then distribution.

    ``catalogue`` maps a lower-case ``model_type`` to the distributions that read it,
    installed or not.
    """

    candidates: tuple[Candidate, ...]
    catalogue: dict[str, tuple[str, ...]]


def discover() -> Installed:
    """Read the entry points of every package on ``sys.path``."""
    candidates: list[Candidate] = []
    catalogue: dict[str, set[str]] = {}
    for distribution, name, version in _our_distributions():
        try:
            entry_points = list(distribution.entry_points)
        except Exception:  # any garbage in the file; it is reported as a plugin that cannot be read
            candidates.append(Candidate(name or "?", None, name, version))
            continue
        for entry_point in entry_points:
            if entry_point.group == PLUGIN_GROUP:
                candidates.append(Candidate(entry_point.name, entry_point.value, name, version))
            elif entry_point.group == CATALOGUE_GROUP:
                package = entry_point.value.strip().replace("_", "-")
                catalogue.setdefault(entry_point.name.lower(), set()).add(package)
    candidates.sort(key=lambda candidate: (candidate.name, candidate.distribution or ""))
    return Installed(
        tuple(candidates),
        {model_type: tuple(sorted(packages)) for model_type, packages in catalogue.items()},
    )


def _our_distributions() -> Iterator[tuple[Distribution, str | None, str | None]]:
    """Packages whose entry points mention us. Of two copies, the one first on ``sys.path`` counts."""
    seen: set[str] = set()
    for distribution in distributions():
        # Parsing the metadata of every package would take most of the start-up time of the command line.
        try:
            text = distribution.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError) as error:  # whose it is can't be told, so no plugin is blamed
            logger.warning("skipped the entry points of %s: %s", _name_and_version(distribution)[0], error)
            continue
        if text is None or f"[{PLUGIN_GROUP}" not in text:
            continue
        name, version = _name_and_version(distribution)
        if name is not None:
            if (normalized := normalize(name)) in seen:
                continue
            seen.add(normalized)
        yield distribution, name, version


def _name_and_version(distribution: Distribution) -> tuple[str | None, str | None]:
    try:
        metadata = distribution.metadata
        return metadata["Name"], metadata["Version"]
    except Exception:  # damaged or missing METADATA: the plugin may work all the same, without a name
        return None, None


def normalize(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
