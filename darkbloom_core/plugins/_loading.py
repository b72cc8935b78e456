"""Import and check one plugin. It either loads whole or leaves nothing behind.

Every plugin gets a pluggy manager of its own: what fails is dropped with its manager,
and a hook that raises cannot stop the hooks of other plugins.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from types import ModuleType

import pluggy

from darkbloom_core import hookspecs
from darkbloom_core.contracts import API_VERSION
from darkbloom_core.plugins._discovery import Candidate
from darkbloom_core.plugins._report import PluginState


class Refused(Exception):
    """A plugin cannot be used. ``state`` and ``reason`` are for its report, the cause for the log."""

    def __init__(self, state: PluginState, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin ready to be asked. ``warning`` says why it may not work, if there is a doubt."""

    manager: pluggy.PluginManager
    hooks: tuple[str, ...]
    notice: str | None
    warning: str | None


def load(candidate: Candidate) -> Loaded:
    """Import the plugin's module and check its contract version and its hooks. Raises ``Refused``."""
    module = _import(candidate)
    warning = _check_version(candidate, getattr(module, "api_version", None))
    notice = getattr(module, "notice", None)
    if notice is not None and not isinstance(notice, str):
        raise Refused(
            "failed", f"its notice must be a text, not {type(notice).__name__}; {advice(candidate)}"
        )
    manager = pluggy.PluginManager("darkbloom")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, candidate.name)
        manager.check_pending()
    except Exception as error:  # reading the attributes of a stranger's module can raise anything
        raise Refused("bad hook", f"{_hook_fault(manager, module, error)}; {advice(candidate)}") from error
    hooks = tuple(sorted(caller.name for caller in manager.get_hookcallers(module) or ()))
    return Loaded(manager, hooks, notice, warning)


def advice(candidate: Candidate) -> str:
    """What to do about a plugin that does not work."""
    package = candidate.distribution or "the package"
    return f"upgrade or uninstall {package}, or set DARKBLOOM_BLOCK_PLUGINS={candidate.name}"


def one_line(error: BaseException) -> str:
    """The type of ``error`` and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _import(candidate: Candidate) -> ModuleType:
    if candidate.value is None:
        raise Refused("failed to import", f"its entry_points.txt cannot be read; {advice(candidate)}")
    name = candidate.value.strip()
    if not all(part.isidentifier() for part in name.split(".")):
        raise Refused(
            "failed to import", f"its entry point must name a module, not {name!r}; {advice(candidate)}"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"the module {error.name} is not installed"
        raise Refused("failed to import", f"{missing}: install it, or {advice(candidate)}") from error
    except (Exception, SystemExit) as error:  # a plugin may raise anything, and must not end the process
        raise Refused("failed to import", f"{one_line(error)}; {advice(candidate)}") from error


def _check_version(candidate: Candidate, version: object) -> str | None:
    """Return a warning for a newer minor version; raise ``Refused`` for another major one."""
    ours = "{}.{}".format(*API_VERSION)
    package = candidate.distribution or "the package"
    match version:
        case (int(major), int(minor)):
            theirs = f"{major}.{minor}"
        case None:
            raise Refused(
                "wrong contract version",
                f"its module states no api_version, this core has contract {ours}; {advice(candidate)}",
            )
        case _:
            raise Refused(
                "wrong contract version",
                f"its api_version must be (major, minor), not {version!r}; {advice(candidate)}",
            )
    if major > API_VERSION[0]:
        raise Refused(
            "wrong contract version",
            f"written for contract {theirs}, this core has {ours}: upgrade darkbloom-core, "
            f"or install a release of {package} for contract {API_VERSION[0]}",
        )
    if major < API_VERSION[0]:
        raise Refused(
            "wrong contract version",
            f"written for contract {theirs}, this core has {ours}: upgrade {package}",
        )
    if minor > API_VERSION[1]:
        return f"written for contract {theirs}, this core has {ours}: upgrade darkbloom-core"
    return None


def _hook_fault(manager: pluggy.PluginManager, module: ModuleType, error: Exception) -> str:
    """What is wrong with a plugin's hooks, from what pluggy has seen of them so far."""
    known = [name for name in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, name)]
    for caller in manager.get_hookcallers(module) or ():
        if not caller.has_spec():
            near = difflib.get_close_matches(caller.name, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            return f"unknown hook {caller.name}: {meant}"
    if isinstance(error, pluggy.PluginValidationError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[1:]) or lines[0]
    return one_line(error)
