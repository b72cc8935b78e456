"""Plugins are found, checked, loaded, blocked and reported; whatever one does, the others work.

Every plugin here is a distribution of its own: a module and a dist-info folder on ``sys.path``.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from darkbloom_core.contracts import API_VERSION, PluginFailed
from darkbloom_core.errors import PluginError, SettingsError, UnsupportedCheckpoint
from darkbloom_core.plugins import PluginOptions, load_plugins
from darkbloom_core.settings import ServerSettings, Settings

GOOD = """
from darkbloom_core.hookspecs import hookimpl

api_version = (1, 0)


class Family:
    version = "1"

    def __init__(self, name, *model_types):
        self.name = name
        self.model_types = frozenset(model_types)
"""

FAMILY = (
    GOOD
    + """
@hookimpl
def model_families():
    return [Family("{name}", "{model_type}")]
"""
)


def family(name, model_type):
    return FAMILY.replace("{name}", name).replace("{model_type}", model_type)


@pytest.fixture
def load(throwaway_distributions):
    """Load only the distributions that the test made, whatever else is installed."""

    def load(**options):
        made = throwaway_distributions.plugin_names
        return load_plugins(PluginOptions(**{"allow": frozenset(made), **options}))

    return load


@pytest.fixture
def report_of(throwaway_distributions):
    def report_of(plugins):
        made = throwaway_distributions.plugin_names
        return {report.name: report for report in plugins.report() if report.name in made}

    return report_of


@pytest.fixture
def install(throwaway_distributions):
    return throwaway_distributions.install


def test_a_plugin_is_found_and_reported_with_its_distribution_version_hooks_and_notice(
    install, load, report_of
):
    install(
        "acme-llm", {"acme": "acme_llm"}, {"acme_llm": family("acme", "acme") + "notice = 'a beta'\n"}, "2.5"
    )
    report = report_of(load())["acme"]
    assert (report.distribution, report.version, report.state) == ("acme-llm", "2.5", "loaded")
    assert report.hooks == ("model_families",)
    assert report.notice == "a beta"
    assert report.reason is None
    assert not report.failed


def test_a_plugin_may_offer_several_families_and_be_a_submodule(install, load, throwaway_distributions):
    (throwaway_distributions.folder / "several").mkdir()
    source = (
        GOOD + "@hookimpl\ndef model_families():\n    return [Family('a', 'a', 'a2'), Family('b', 'b')]\n"
    )
    install("throwaway-several", {"several": "several.inner"}, {"several/inner": source})
    plugins = load()
    assert [found.name for found in plugins.families()] == ["a", "b"]
    assert plugins.family_for({"model_type": "A2"}).name == "a"
    assert plugins.plugin_of_family("b").distribution == "throwaway-several"


def test_plugins_are_asked_in_the_order_of_their_entry_point_names(install, load):
    for name, entry in (("one", "zeta"), ("two", "beta"), ("three", "Alpha")):
        install(name, {entry: f"order_{name}"}, {f"order_{name}": family(entry, entry)})
    assert [found.name for found in load().families()] == ["Alpha", "beta", "zeta"]


BROKEN_MODULES = {
    "raises": ("raise RuntimeError('no\\nway')", "failed to import", "RuntimeError: no"),
    "exits": ("raise SystemExit(3)", "failed to import", "SystemExit: 3"),
    "lacks": ("import surely_not_there", "failed to import", "surely_not_there is not installed"),
    "syntax": ("def f(:", "failed to import", "SyntaxError"),
    "no_version": ("", "wrong contract version", "states no api_version"),
    "odd_version": ("api_version = '1.0'", "wrong contract version", "must be (major, minor), not '1.0'"),
    "older": ("api_version = (0, 9)", "wrong contract version", "this core has 1.0: upgrade throwaway-older"),
    "newer": ("api_version = (2, 0)", "wrong contract version", "this core has 1.0: upgrade darkbloom-core"),
    "misspelt": (
        GOOD + "@hookimpl\ndef model_famlies():\n    return []\n",
        "bad hook",
        "unknown hook model_famlies: did you mean model_families?",
    ),
    "stranger": (
        GOOD + "@hookimpl\ndef xyzzy():\n    return []\n",
        "bad hook",
        "unknown hook xyzzy: there are cache_tiers, checkpoints,",
    ),
    "argument": (
        GOOD
        + "@hookimpl\ndef cache_tiers():\n    return []\n@hookimpl\ndef model_families(gpu):\n    return []\n",
        "bad hook",
        "gpu",
    ),
    "half_way": (
        GOOD + "@hookimpl\ndef cache_tiers():\n    return []\n@hookimpl\ndef zzz():\n    return []\n",
        "bad hook",
        "unknown hook zzz",
    ),
    "notice": ("api_version = (1, 0)\nnotice = 3", "failed", "notice must be a text, not int"),
}


@pytest.mark.parametrize("name", BROKEN_MODULES)
def test_a_broken_plugin_leaves_nothing_registered_and_says_what_to_do(
    name, install, load, report_of, caplog
):
    source, state, reason = BROKEN_MODULES[name]
    install(f"throwaway-{name}", {f"b-{name}": f"broken_{name}"}, {f"broken_{name}": source})
    install(
        "throwaway-sound",
        {"a-sound": "sound_a", "c-sound": "sound_c"},
        {"sound_a": family("a", "a"), "sound_c": family("c", "c")},
    )
    plugins = load()
    report = report_of(plugins)[f"b-{name}"]
    assert report.state == state
    assert report.failed
    assert reason in report.reason
    assert "\n" not in report.reason
    assert "upgrade" in report.reason
    assert report.hooks == ()
    assert [found.name for found in plugins.families()] == ["a", "c"]
    assert plugins.cache_tiers() == ()
    (logged,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"plugin b-{name} (throwaway-{name} 1.0): {state}: {report.reason}" in logged
    assert plugins.failure_events() == (
        PluginFailed(plugin=f"b-{name}", distribution=f"throwaway-{name}", state=state),
    )


def test_what_an_import_cannot_find_is_named_with_what_to_install(install, load, report_of):
    install("throwaway-x", {"x": "needs_more"}, {"needs_more": "import surely_not_there.inner"})
    reason = report_of(load())["x"].reason
    assert reason == (
        "the module surely_not_there is not installed: install it, or upgrade or uninstall throwaway-x, "
        "or set DARKBLOOM_BLOCK_PLUGINS=x"
    )


def test_a_newer_minor_version_warns_and_loads(install, load, report_of, caplog):
    major, minor = API_VERSION
    source = family("later", "later").replace("(1, 0)", f"({major}, {minor + 1})")
    install("throwaway-later", {"later": "later_plugin"}, {"later_plugin": source})
    plugins = load(strict=True)
    report = report_of(plugins)["later"]
    assert report.state == "loaded"
    assert f"written for contract {major}.{minor + 1}" in report.reason
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert [found.name for found in plugins.families()] == ["later"]


def test_a_plugin_that_is_not_on_the_allow_list_is_not_even_imported(install, load, report_of):
    for name in ("chosen", "other"):
        install(f"throwaway-{name}", {name: f"allow_{name}"}, {f"allow_{name}": family(name, name)})
    plugins = load(allow=frozenset({"chosen"}))
    assert [found.name for found in plugins.families()] == ["chosen"]
    assert report_of(plugins)["other"].state == "not allowed"
    assert not report_of(plugins)["other"].failed
    assert "allow_other" not in sys.modules


def test_a_blocked_plugin_is_not_imported_even_if_it_is_allowed(install, load, report_of):
    install("throwaway-x", {"x": "block_x"}, {"block_x": "raise RuntimeError"})
    plugins = load(block=frozenset({"x"}), strict=True)
    assert report_of(plugins)["x"].state == "blocked"
    assert "DARKBLOOM_BLOCK_PLUGINS" in report_of(plugins)["x"].reason
    assert "block_x" not in sys.modules


def test_the_lists_come_from_the_environment_with_commas_between():
    options = PluginOptions.from_environment(
        {"DARKBLOOM_PLUGINS": " a, b ,,", "DARKBLOOM_BLOCK_PLUGINS": "c"}
    )
    assert (options.allow, options.block) == (frozenset({"a", "b"}), frozenset({"c"}))
    assert PluginOptions.from_environment({}) == PluginOptions()
    assert PluginOptions.from_environment({"DARKBLOOM_PLUGINS": ""}).allow == frozenset()


def test_a_name_on_a_list_that_nothing_registers_is_reported(install, load, report_of):
    install("throwaway-x", {"gpt-x": "listed_x"}, {"listed_x": family("x", "x")})
    plugins = load(allow=frozenset({"gpt-y"}), block=frozenset({"gpt-z"}))
    reports = {report.name: report for report in plugins.report()}
    assert (reports["gpt-y"].state, reports["gpt-y"].failed) == ("not installed", True)
    assert "did you mean gpt-x?" in reports["gpt-y"].reason
    assert (reports["gpt-z"].state, reports["gpt-z"].failed) == ("blocked", False)
    assert "no installed package registers such a plugin" in reports["gpt-z"].reason


def test_strict_names_every_failure_in_one_error(install, load):
    install("throwaway-a", {"a": "strict_a"}, {"strict_a": "raise RuntimeError('first')"})
    install("throwaway-b", {"b": "strict_b"}, {"strict_b": "api_version = (9, 0)"})
    with pytest.raises(PluginError) as raised:
        load(strict=True)
    assert "plugin a (throwaway-a 1.0): failed to import: RuntimeError: first" in str(raised.value)
    assert "plugin b (throwaway-b 1.0): wrong contract version" in str(raised.value)


def test_strict_raises_for_a_hook_that_raises_later(install, load):
    install(
        "throwaway-a",
        {"a": "strict_late"},
        {"strict_late": GOOD + "@hookimpl\ndef cache_tiers():\n    1 / 0\n"},
    )
    plugins = load(strict=True)
    with pytest.raises(PluginError, match="cache_tiers raised ZeroDivisionError"):
        plugins.cache_tiers()


def test_a_hook_that_raises_fails_its_plugin_once_and_stops_no_other(install, load, report_of, caplog):
    source = family("b", "b") + "@hookimpl\ndef cache_tiers():\n    raise SystemExit('bye')\n"
    for name, text in (("a", family("a", "a")), ("b", source), ("c", family("c", "c"))):
        install(f"throwaway-{name}", {name: f"late_{name}"}, {f"late_{name}": text})
    plugins = load()
    assert plugins.cache_tiers() == ()
    assert plugins.cache_tiers() == ()
    assert report_of(plugins)["b"].state == "failed"
    assert "its hook cache_tiers raised SystemExit: bye" in report_of(plugins)["b"].reason
    assert len(caplog.records) == 1
    assert [found.name for found in plugins.families()] == ["a", "c"]


def test_verify_finds_what_fails_only_when_it_is_asked(install, load):
    install(
        "throwaway-a",
        {"a": "verified"},
        {"verified": GOOD + "@hookimpl\ndef checkpoints():\n    return {'x': 'y'}\n"},
    )
    (report,) = [report for report in load().verify() if report.name == "a"]
    assert report.state == "failed"
    assert "a checkpoint's folder must be a pathlib.Path" in report.reason


@pytest.mark.parametrize("returned", ["3", "[3]", "[Family('x', 'x'), object()]", "[Family(3, 'x')]"])
def test_what_is_no_family_is_refused_whole(returned, install, load, report_of):
    source = GOOD + f"@hookimpl\ndef model_families():\n    return {returned}\n"
    install("throwaway-a", {"a": "nonsense"}, {"nonsense": source})
    plugins = load()
    assert plugins.families() == ()
    assert report_of(plugins)["a"].state == "failed"


def test_the_later_of_two_families_with_one_model_type_is_refused(install, load, report_of):
    source = (
        GOOD
        + "@hookimpl\ndef model_families():\n    return [Family('new', 'new'), Family('rival', 'SAME')]\n"
    )
    install("throwaway-a", {"a": "claim_a"}, {"claim_a": family("first", "same")})
    install("throwaway-b", {"b": "claim_b"}, {"claim_b": source})
    plugins = load()
    assert [found.name for found in plugins.families()] == ["first"]
    assert report_of(plugins)["b"].state == "failed"
    assert "the family first reads model_type same already" in report_of(plugins)["b"].reason
    assert plugins.family_for({"model_type": "Same"}).name == "first"


def test_the_later_of_two_plugins_with_one_name_is_refused(install, load):
    install("throwaway-b", {"same": "name_b"}, {"name_b": family("b", "b")})
    install("throwaway-a", {"same": "name_a"}, {"name_a": family("a", "a")})
    plugins = load()
    assert [found.name for found in plugins.families()] == ["a"]
    states = [(report.distribution, report.state) for report in plugins.report() if report.name == "same"]
    assert states == [("throwaway-a", "loaded"), ("throwaway-b", "duplicate name")]


@pytest.mark.parametrize("hook", ["checkpoints", "cache_tiers"])
def test_the_later_of_two_plugins_that_bring_a_thing_of_one_name_is_refused(hook, install, load, report_of):
    returned = {
        "checkpoints": "{'demo': Path('/NAME')}",
        "cache_tiers": "[SimpleNamespace(name='demo', of='NAME')]",
    }
    source = (
        GOOD
        + "from pathlib import Path\nfrom types import SimpleNamespace\n"
        + f"@hookimpl\ndef {hook}():\n    return {returned[hook]}\n"
    )
    for name in ("a", "b"):
        module = f"brings_{hook}_{name}"
        install(f"throwaway-{name}", {name: module}, {module: source.replace("NAME", name)})
    plugins = load()
    if hook == "checkpoints":
        assert plugins.checkpoints() == {"demo": Path("/a")}
    else:
        assert [tier.of for tier in plugins.cache_tiers()] == ["a"]
    assert report_of(plugins)["b"].state == "failed"
    assert "demo already: keep one of the two" in report_of(plugins)["b"].reason


def test_a_missing_family_is_named_by_its_package_from_the_catalogue(install, load):
    install("throwaway-bundle", {}, {}, catalogue={"Marvel_2": "darkbloom_marvel"})
    with pytest.raises(UnsupportedCheckpoint, match=r"model_type 'marvel_2': pip install darkbloom-marvel$"):
        load().family_for({"model_type": "marvel_2"})


def test_a_family_whose_plugin_is_out_of_use_says_why_instead_of_what_to_install(install, load):
    install("throwaway-bundle", {}, {}, catalogue={"marvel": "darkbloom_marvel"})
    install("Darkbloom_Marvel", {"marvel": "marvel_plugin"}, {"marvel_plugin": family("marvel", "marvel")})
    with pytest.raises(
        UnsupportedCheckpoint, match="the plugin marvel of Darkbloom_Marvel does, but it is blocked"
    ):
        load(block=frozenset({"marvel"})).family_for({"model_type": "marvel"})


def test_an_unknown_family_gets_a_hint_and_what_can_be_read(install, load):
    install("throwaway-a", {"a": "hint_a"}, {"hint_a": family("a", "readable")})
    with pytest.raises(
        UnsupportedCheckpoint, match=r"'mystery': install a package .*\(readable here: readable\)"
    ):
        load().family_for({"model_type": "mystery"})


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}, {"model_type": ""}])
def test_a_config_without_a_model_type_says_so(config, load):
    with pytest.raises(UnsupportedCheckpoint, match="has no model_type"):
        load().family_for(config)


ROUTES = (
    GOOD
    + """
@hookimpl
def server_routes(settings):
    from starlette.routing import Route
    return [Route("/NAME", lambda request: None)]
"""
)


def served(*names):
    return Settings(server=ServerSettings(route_plugins=names))


def test_only_plugins_named_in_the_settings_are_asked_for_routes(install, load):
    for name in ("a", "b"):
        install(
            f"throwaway-{name}", {name: f"routes_{name}"}, {f"routes_{name}": ROUTES.replace("NAME", name)}
        )
    plugins = load()
    assert plugins.server_routes(served()) == ()
    assert [route.path for route in plugins.server_routes(served("b", "a"))] == ["/b", "/a"]


def test_naming_a_plugin_that_can_give_no_routes_is_a_settings_error(install, load):
    install("throwaway-a", {"mute": "routes_mute"}, {"routes_mute": GOOD})
    install("throwaway-b", {"broken": "routes_broken"}, {"routes_broken": "raise RuntimeError('oh')"})
    plugins = load()
    with pytest.raises(SettingsError, match=r"route_plugins names mut, but .* did you mean mute\?"):
        plugins.server_routes(served("mut"))
    with pytest.raises(SettingsError, match="names mute, which has no routes"):
        plugins.server_routes(served("mute"))
    with pytest.raises(SettingsError, match="names broken, which is failed to import: RuntimeError: oh"):
        plugins.server_routes(served("broken"))


def test_wrong_options_are_the_operators_error_and_not_the_plugins(install, load, report_of):
    source = GOOD + (
        "from darkbloom_core.errors import SettingsError\n"
        "@hookimpl\ndef telemetry_sinks(settings):\n    raise SettingsError('options.a.x is unknown')\n"
    )
    install("throwaway-a", {"a": "options_a"}, {"options_a": source})
    plugins = load()
    with pytest.raises(SettingsError, match=r"options\.a\.x is unknown"):
        plugins.telemetry_sinks(Settings())
    assert report_of(plugins)["a"].state == "loaded"


COMMANDS = (
    GOOD
    + """
@hookimpl
def cli_commands(app):
    @app.command()
    def NAME():
        print("this is NAME")
    AFTER
"""
)


NAMELESS_GROUP = """
    group = type(app)()
    group.command("within")(lambda: None)
    app.add_typer(group)
"""


def test_commands_are_added_whole_or_not_at_all_and_never_replace_one(install, load, report_of):
    sources = {
        "a": COMMANDS.replace("NAME", "hello").replace("AFTER", ""),
        "b": COMMANDS.replace("NAME", "half").replace("AFTER", "1 / 0"),
        "c": COMMANDS.replace("NAME", "serve").replace("AFTER", ""),
        "d": COMMANDS.replace("NAME", "hello").replace("AFTER", ""),
        "e": COMMANDS.replace("NAME", "other").replace("AFTER", "app.callback()(lambda: None)"),
        "f": COMMANDS.replace("NAME", "last").replace("AFTER", "app.add_typer(type(app)(name='group'))"),
        "g": COMMANDS.replace("NAME", "group").replace("AFTER", ""),
        "h": COMMANDS.replace("NAME", "more").replace("AFTER", NAMELESS_GROUP),
        "i": COMMANDS.replace("NAME", "within").replace("AFTER", ""),
    }
    for name, source in sources.items():
        install(f"throwaway-{name}", {name: f"commands_{name}"}, {f"commands_{name}": source})
    app = typer.Typer()

    @app.command()
    def serve():
        typer.echo("the core's own")

    plugins = load()
    plugins.cli_commands(app)
    assert {report.name for report in report_of(plugins).values() if report.failed} == set("bcdegi")
    assert "there is a command serve already" in report_of(plugins)["c"].reason
    assert CliRunner().invoke(app, ["serve"]).output == "the core's own\n"
    assert CliRunner().invoke(app, ["hello"]).output == "this is hello\n"
    assert CliRunner().invoke(app, ["last"]).output == "this is last\n"
    assert CliRunner().invoke(app, ["half"]).exit_code == 2


def test_damaged_metadata_of_one_package_hides_no_other(install, load, report_of, throwaway_distributions):
    folder = throwaway_distributions.folder
    for name, content in {
        "garbage": b"[darkbloom]\nno value here\n",
        "bytes": b"[darkbloom]\na = \xff\xfe\n",
        "attribute": b"[darkbloom]\nattribute = os:path\n",
        "spaces": b"[darkbloom]\nspaces = a b\n",
    }.items():
        (folder / f"{name}-1.dist-info").mkdir()
        (folder / f"{name}-1.dist-info" / "entry_points.txt").write_bytes(content)
    install("throwaway-sound", {"sound": "sound_among"}, {"sound_among": family("sound", "sound")})
    importlib.invalidate_caches()
    plugins = load(allow=frozenset({"sound", "attribute", "spaces", "?"}))
    states = {report.name: report.state for report in plugins.report() if report.state != "not allowed"}
    assert states == {
        "sound": "loaded",
        "attribute": "failed to import",
        "spaces": "failed to import",
        "?": "failed to import",
    }
    assert [found.name for found in plugins.families()] == ["sound"]


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(
    install, load, throwaway_distributions, tmp_path
):
    install("throwaway-twice", {"twice": "twice_new"}, {"twice_new": family("new", "new")}, "2.0")
    older = tmp_path / "older"
    older.mkdir()
    sys.path.append(str(older))
    try:
        throwaway_distributions.install(
            "Throwaway.Twice",
            {"twice": "twice_old"},
            {"twice_old": family("old", "old")},
            "1.0",
            folder=older,
        )
        plugins = load()
        assert [report.version for report in plugins.report() if report.name == "twice"] == ["2.0"]
        assert [found.name for found in plugins.families()] == ["new"]
    finally:
        sys.path.remove(str(older))


def test_loading_what_is_installed_here_is_quick_and_imports_nothing_heavy():
    script = (
        "import json, sys, time\n"
        "from darkbloom_core.plugins import load_plugins\n"
        "start = time.perf_counter()\n"
        "plugins = load_plugins()\n"
        "seconds = time.perf_counter() - start\n"
        "heavy = sorted({name.split('.')[0] for name in sys.modules})\n"
        "print(json.dumps([seconds, [report.name for report in plugins.report() if report.failed], heavy]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DARKBLOOM_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    seconds, failed, imported = json.loads(done.stdout)
    assert failed == []
    heavy = {
        "mlx",
        "mlx_lm",
        "mlx_vlm",
        "transformers",
        "torch",
        "numpy",
        "starlette",
        "pydantic",
        "typer",
        "opentelemetry",
    }
    assert heavy.isdisjoint(imported), (
        "import these inside the hook functions of the plugin that brought them"
    )
    assert seconds < 1.0
