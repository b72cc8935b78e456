"""The loaded plugins, and what they offer: every hook is called guarded, in the order of the plugins' names.

A plugin whose hook raises is marked failed, reported and logged once, and not asked
again; what it gave before stays. A ``SettingsError`` of a hook that is given the settings
is the operator's to mend and passes through.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from darkbloom_core.contracts import CacheTierFactory, ModelFamily, PluginFailed, TelemetrySink
from darkbloom_core.errors import PluginError, SettingsError, UnsupportedCheckpoint
from darkbloom_core.plugins._commands import add_commands
from darkbloom_core.plugins._discovery import Candidate, discover
from darkbloom_core.plugins._families import FamilyTable, missing_family
from darkbloom_core.plugins._loading import Loaded, Refused, advice, load, one_line
from darkbloom_core.plugins._options import ALLOW_VARIABLE, BLOCK_VARIABLE, PluginOptions
from darkbloom_core.plugins._report import PluginReport, PluginState

if TYPE_CHECKING:
    import typer
    from starlette.routing import BaseRoute

    from darkbloom_core.settings import Settings

logger = logging.getLogger("darkbloom.plugins")

Result = TypeVar("Result")

_HOOKS_WITH_SETTINGS = frozenset({"telemetry_sinks", "server_routes"})


@dataclass(slots=True)
class _Plugin:
    candidate: Candidate
    state: PluginState
    reason: str | None = None
    loaded: Loaded | None = None

    @property
    def report(self) -> PluginReport:
        return PluginReport(
            name=self.candidate.name,
            distribution=self.candidate.distribution,
            version=self.candidate.version,
            hooks=self.loaded.hooks if self.loaded else (),
            state=self.state,
            reason=self.reason,
            notice=self.loaded.notice if self.loaded else None,
        )


def load_plugins(options: PluginOptions | None = None) -> Plugins:
    """Find and load every installed plugin that ``options`` allow (default: the environment's).

    Raises ``PluginError`` naming every failure if ``options.strict``; otherwise never.
    """
    options = PluginOptions.from_environment() if options is None else options
    installed = discover()
    plugins: list[_Plugin] = []
    for candidate in installed.candidates:
        plugins.append(_load_one(candidate, plugins, options))
    plugins += _not_installed(options, {plugin.candidate.name for plugin in plugins})
    plugins.sort(key=lambda plugin: plugin.candidate.name)
    failures = [plugin.report for plugin in plugins if plugin.report.failed]
    if options.strict and failures:
        raise PluginError("; ".join(_sentence(report) for report in failures))
    return Plugins(plugins, installed.catalogue, strict=options.strict)


class Plugins:
    """What is loaded, and what it offers. Made by ``load_plugins``; any thread may call it.

    In strict mode a plugin that fails when it is asked raises ``PluginError``.
    """

    def __init__(
        self, plugins: list[_Plugin], catalogue: Mapping[str, tuple[str, ...]], *, strict: bool
    ) -> None:
        self._plugins = plugins
        self._catalogue = catalogue
        self._strict = strict
        self._lock = threading.RLock()
        self._table: FamilyTable | None = None

    def report(self) -> tuple[PluginReport, ...]:
        """Every plugin in order of name, as it stands now."""
        return tuple(plugin.report for plugin in self._plugins)

    def failure_events(self) -> tuple[PluginFailed, ...]:
        """A telemetry event for each plugin that has failed so far."""
        return tuple(
            PluginFailed(plugin=report.name, distribution=report.distribution, state=report.state)
            for report in self.report()
            if report.failed
        )

    def verify(self) -> tuple[PluginReport, ...]:
        """Ask every hook that needs no settings, so that the report shows also what fails when asked."""
        self.families()
        self.checkpoints()
        self.cache_tiers()
        return self.report()

    def families(self) -> tuple[ModelFamily, ...]:
        """The model families, asked for once. No two read the same ``model_type``."""
        return self._families().families

    def plugin_of_family(self, family: str) -> PluginReport:
        """The plugin that brought the family called ``family``."""
        name = self._families().plugin_of[family]
        return next(report for report in self.report() if report.name == name)

    def family_for(self, config: Mapping[str, Any]) -> ModelFamily:
        """The family that reads a checkpoint with this ``config.json``.

        Raises ``UnsupportedCheckpoint`` that says which package to install, if there is none.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise UnsupportedCheckpoint(
                "config.json has no model_type, so no family can be chosen: is this a checkpoint's folder?"
            )
        readable = self._families().by_model_type
        family = readable.get(model_type.lower())
        if family is None:
            raise UnsupportedCheckpoint(
                missing_family(model_type, tuple(readable), self._catalogue, self.report())
            )
        return family

    def checkpoints(self) -> dict[str, Path]:
        """Checkpoints that plugins bring: a model name to its folder."""
        found: dict[str, Path] = {}

        def take(hook: pluggy.HookCaller) -> None:
            for named in hook():
                _refuse_taken("checkpoint", found, named)
                if not all(isinstance(path, Path) for path in named.values()):
                    raise TypeError("a checkpoint's folder must be a pathlib.Path")
                found.update(named)

        self._ask_all("checkpoints", take)
        return found

    def cache_tiers(self) -> tuple[CacheTierFactory, ...]:
        """The cache tiers. No two have the same name."""
        found: dict[str, CacheTierFactory] = {}

        def take(hook: pluggy.HookCaller) -> None:
            named = {tier.name: tier for tier in _items(hook())}
            _refuse_taken("cache tier", found, named)
            found.update(named)

        self._ask_all("cache_tiers", take)
        return tuple(found.values())

    def telemetry_sinks(self, settings: Settings) -> tuple[TelemetrySink, ...]:
        """New sinks, for the caller to close. Raises ``SettingsError`` if a plugin's options are wrong."""
        given = self._ask_all("telemetry_sinks", lambda hook: _items(hook(settings=settings)))
        return tuple(sink for sinks in given for sink in sinks)

    def server_routes(self, settings: Settings) -> tuple[BaseRoute, ...]:
        """Routes of the plugins named in ``server.route_plugins``, in that order.

        Raises ``SettingsError`` if one of them is not loaded or has no routes.
        """
        named = [self._plugin_with_routes(name) for name in settings.server.route_plugins]
        given = self._ask_all("server_routes", lambda hook: _items(hook(settings=settings)), named)
        return tuple(route for routes in given for route in routes)

    def cli_commands(self, app: typer.Typer) -> None:
        """Let plugins add to ``app``. One that fails, or takes a name that is taken, adds nothing."""
        self._ask_all("cli_commands", lambda hook: add_commands(app, lambda addition: hook(app=addition)))

    def _families(self) -> FamilyTable:
        with self._lock:
            if self._table is None:
                table = FamilyTable()

                def add(plugin: str, hook: pluggy.HookCaller) -> None:
                    table.add(plugin, _items(hook()))

                for plugin in self._plugins:
                    self._ask_all("model_families", partial(add, plugin.candidate.name), [plugin])
                self._table = table
            return self._table

    def _plugin_with_routes(self, name: str) -> _Plugin:
        where = f"server.route_plugins names {name}"
        plugin = next((plugin for plugin in self._plugins if plugin.candidate.name == name), None)
        if plugin is None:
            raise SettingsError(f"{where}, {_unknown(name, self._names())}")
        if plugin.loaded is None or plugin.state != "loaded":
            raise SettingsError(
                f"{where}, which is {plugin.state}" + (f": {plugin.reason}" if plugin.reason else "")
            )
        if "server_routes" not in plugin.loaded.hooks:
            raise SettingsError(f"{where}, which has no routes: take it out of the list")
        return plugin

    def _names(self) -> list[str]:
        return [plugin.candidate.name for plugin in self._plugins]

    def _ask_all(
        self,
        hook: str,
        use: Callable[[pluggy.HookCaller], Result],
        plugins: Collection[_Plugin] | None = None,
    ) -> list[Result]:
        """Call ``use(hook)`` for each plugin that has the hook; one that raises gives nothing."""
        results: list[Result] = []
        for plugin in self._plugins if plugins is None else plugins:
            if plugin.state != "loaded" or plugin.loaded is None or hook not in plugin.loaded.hooks:
                continue
            try:
                results.append(use(getattr(plugin.loaded.manager.hook, hook)))
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                if isinstance(error, SettingsError) and hook in _HOOKS_WITH_SETTINGS:
                    raise
                plugin.state = "failed"
                plugin.reason = f"its hook {hook} raised {one_line(error)}; {advice(plugin.candidate)}"
                _log_failure(plugin.report, error)
                if self._strict:
                    raise PluginError(_sentence(plugin.report)) from error
        return results


def _load_one(candidate: Candidate, earlier: list[_Plugin], options: PluginOptions) -> _Plugin:
    if candidate.name in options.block:
        return _Plugin(candidate, "blocked", f"named by {BLOCK_VARIABLE}")
    if options.allow is not None and candidate.name not in options.allow:
        return _Plugin(candidate, "not allowed", f"not among the names in {ALLOW_VARIABLE}")
    plugin = _Plugin(candidate, "loaded")
    cause: BaseException | None = None
    owner = next((other.candidate for other in earlier if other.candidate.name == candidate.name), None)
    if owner is not None:
        plugin.state = "duplicate name"
        plugin.reason = (
            f"{owner.distribution or 'another package'} registers this name too: uninstall one of the two"
        )
    else:
        try:
            plugin.loaded = load(candidate)
            plugin.reason = plugin.loaded.warning
        except Refused as refused:
            plugin.state, plugin.reason, cause = refused.state, refused.reason, refused.__cause__
    if plugin.report.failed:
        _log_failure(plugin.report, cause)
    elif plugin.reason:
        logger.warning("%s", _sentence(plugin.report))
    return plugin


def _not_installed(options: PluginOptions, installed: set[str]) -> Iterator[_Plugin]:
    """Names in the lists that nothing registers: of the allow-list a failure, of the block-list a remark."""
    for name in sorted((options.allow or set()) - options.block - installed):
        reason = f"named by {ALLOW_VARIABLE}, {_unknown(name, installed)}"
        plugin = _Plugin(Candidate(name, None, None, None), "not installed", reason)
        _log_failure(plugin.report, None)
        yield plugin
    for name in sorted(options.block - installed):
        reason = f"named by {BLOCK_VARIABLE}, {_unknown(name, installed)}"
        yield _Plugin(Candidate(name, None, None, None), "blocked", reason)


def _unknown(name: str, installed: Collection[str]) -> str:
    near = difflib.get_close_matches(name, installed, n=1)
    meant = f"did you mean {near[0]}?" if near else f"installed are {', '.join(sorted(installed)) or 'none'}"
    return f"but no installed package registers such a plugin: {meant}"


def _items(results: list[Any]) -> list[Any]:
    """What the functions of one plugin's hook returned, together."""
    return [item for result in results for item in result]


def _refuse_taken(what: str, found: Mapping[str, object], named: Mapping[str, object]) -> None:
    if taken := sorted(found.keys() & named.keys()):
        raise ValueError(f"another plugin has a {what} {taken[0]} already: keep one of the two")


def _sentence(report: PluginReport) -> str:
    origin = f" ({report.distribution} {report.version})" if report.distribution else ""
    return f"plugin {report.name}{origin}: {report.state}: {report.reason}"


def _log_failure(report: PluginReport, cause: BaseException | None) -> None:
    """Log a failure once; with the traceback where somebody debugs."""
    logger.error("%s", _sentence(report), exc_info=cause if logger.isEnabledFor(logging.DEBUG) else None)
