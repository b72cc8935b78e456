"""What plugins offer: each hook is asked guarded, and whatever one plugin gives, the others work."""

from pathlib import Path

import pytest
import typer
from plugin_sources import GOOD, family
from typer.testing import CliRunner

from darkbloom_core.errors import PluginError, SettingsError, UnsupportedCheckpoint
from darkbloom_core.settings import ServerSettings, Settings


def test_strict_raises_for_a_hook_that_raises_later(install, load_made):
    install(
        "throwaway-a",
        {"a": "strict_late"},
        {"strict_late": GOOD + "@hookimpl\ndef cache_tiers():\n    1 / 0\n"},
    )
    plugins = load_made(strict=True)
    with pytest.raises(PluginError, match="cache_tiers raised ZeroDivisionError"):
        plugins.cache_tiers()


def test_plugins_are_asked_in_the_order_of_their_entry_point_names(install, load_made):
    for name, entry in (("one", "zeta"), ("two", "beta"), ("three", "Alpha")):
        install(name, {entry: f"order_{name}"}, {f"order_{name}": family(entry, entry)})
    assert [found.name for found in load_made().families()] == ["Alpha", "beta", "zeta"]


def test_a_plugin_may_offer_several_families_and_be_a_submodule(install, load_made, throwaway_distributions):
    (throwaway_distributions.folder / "several").mkdir()
    source = (
        GOOD + "@hookimpl\ndef model_families():\n    return [Family('a', 'a', 'a2'), Family('b', 'b')]\n"
    )
    install("throwaway-several", {"several": "several.inner"}, {"several/inner": source})
    plugins = load_made()
    assert [found.name for found in plugins.families()] == ["a", "b"]
    assert plugins.family_for({"model_type": "A2"}).name == "a"
    assert plugins.plugin_of_family("b").distribution == "throwaway-several"


def test_a_hook_that_raises_fails_its_plugin_once_and_stops_no_other(install, load_made, report_of, caplog):
    source = family("b", "b") + "@hookimpl\ndef cache_tiers():\n    raise SystemExit('bye')\n"
    for name, text in (("a", family("a", "a")), ("b", source), ("c", family("c", "c"))):
        install(f"throwaway-{name}", {name: f"late_{name}"}, {f"late_{name}": text})
    plugins = load_made()
    assert plugins.cache_tiers() == ()
    assert plugins.cache_tiers() == ()
    assert report_of(plugins)["b"].state == "failed"
    assert "its hook cache_tiers raised SystemExit: bye" in report_of(plugins)["b"].reason
    assert len(caplog.records) == 1
    assert [found.name for found in plugins.families()] == ["a", "c"]


def test_verify_finds_what_fails_only_when_it_is_asked(install, load_made):
    install(
        "throwaway-a",
        {"a": "verified"},
        {"verified": GOOD + "@hookimpl\ndef checkpoints():\n    return {'x': 'y'}\n"},
    )
    (report,) = [report for report in load_made().verify() if report.name == "a"]
    assert report.state == "failed"
    assert "a checkpoint's folder must be a pathlib.Path" in report.reason


@pytest.mark.parametrize("returned", ["3", "[3]", "[Family('x', 'x'), object()]", "[Family(3, 'x')]"])
def test_what_is_no_family_is_refused_whole(returned, install, load_made, report_of):
    source = GOOD + f"@hookimpl\ndef model_families():\n    return {returned}\n"
    install("throwaway-a", {"a": "nonsense"}, {"nonsense": source})
    plugins = load_made()
    assert plugins.families() == ()
    assert report_of(plugins)["a"].state == "failed"


def test_the_later_of_two_families_with_one_model_type_is_refused(install, load_made, report_of):
    source = (
        GOOD
        + "@hookimpl\ndef model_families():\n    return [Family('new', 'new'), Family('rival', 'SAME')]\n"
    )
    install("throwaway-a", {"a": "claim_a"}, {"claim_a": family("first", "same")})
    install("throwaway-b", {"b": "claim_b"}, {"claim_b": source})
    plugins = load_made()
    assert [found.name for found in plugins.families()] == ["first"]
    assert report_of(plugins)["b"].state == "failed"
    assert "the family first reads model_type same already" in report_of(plugins)["b"].reason
    assert plugins.family_for({"model_type": "Same"}).name == "first"


@pytest.mark.parametrize("hook", ["checkpoints", "cache_tiers"])
def test_the_later_of_two_plugins_that_bring_a_thing_of_one_name_is_refused(
    hook, install, load_made, report_of
):
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
    plugins = load_made()
    if hook == "checkpoints":
        assert plugins.checkpoints() == {"demo": Path("/a")}
    else:
        assert [tier.of for tier in plugins.cache_tiers()] == ["a"]
    assert report_of(plugins)["b"].state == "failed"
    assert "demo already: keep one of the two" in report_of(plugins)["b"].reason


def test_a_missing_family_is_named_by_its_package_from_the_catalogue(install, load_made):
    install("throwaway-bundle", {}, {}, catalogue={"Marvel_2": "darkbloom_marvel"})
    with pytest.raises(UnsupportedCheckpoint, match=r"model_type 'marvel_2': pip install darkbloom-marvel$"):
        load_made().family_for({"model_type": "marvel_2"})


def test_a_family_whose_plugin_is_out_of_use_says_why_instead_of_what_to_install(install, load_made):
    install("throwaway-bundle", {}, {}, catalogue={"marvel": "darkbloom_marvel"})
    install("Darkbloom_Marvel", {"marvel": "marvel_plugin"}, {"marvel_plugin": family("marvel", "marvel")})
    with pytest.raises(
        UnsupportedCheckpoint, match="the plugin marvel of Darkbloom_Marvel does, but it is blocked"
    ):
        load_made(block=frozenset({"marvel"})).family_for({"model_type": "marvel"})


def test_an_unknown_family_gets_a_hint_and_what_can_be_read(install, load_made):
    install("throwaway-a", {"a": "hint_a"}, {"hint_a": family("a", "readable")})
    with pytest.raises(
        UnsupportedCheckpoint, match=r"'mystery': install a package .*\(readable here: readable\)"
    ):
        load_made().family_for({"model_type": "mystery"})


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}, {"model_type": ""}])
def test_a_config_without_a_model_type_says_so(config, load_made):
    with pytest.raises(UnsupportedCheckpoint, match="has no model_type"):
        load_made().family_for(config)


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


def test_only_plugins_named_in_the_settings_are_asked_for_routes(install, load_made):
    for name in ("a", "b"):
        install(
            f"throwaway-{name}", {name: f"routes_{name}"}, {f"routes_{name}": ROUTES.replace("NAME", name)}
        )
    plugins = load_made()
    assert plugins.server_routes(served()) == ()
    assert [route.path for route in plugins.server_routes(served("b", "a"))] == ["/b", "/a"]


def test_naming_a_plugin_that_can_give_no_routes_is_a_settings_error(install, load_made):
    install("throwaway-a", {"mute": "routes_mute"}, {"routes_mute": GOOD})
    install("throwaway-b", {"broken": "routes_broken"}, {"routes_broken": "raise RuntimeError('oh')"})
    plugins = load_made()
    with pytest.raises(SettingsError, match=r"route_plugins names mut, but .* did you mean mute\?"):
        plugins.server_routes(served("mut"))
    with pytest.raises(SettingsError, match="names mute, which has no routes"):
        plugins.server_routes(served("mute"))
    with pytest.raises(SettingsError, match="names broken, which is failed to import: RuntimeError: oh"):
        plugins.server_routes(served("broken"))


def test_wrong_options_are_the_operators_error_and_not_the_plugins(install, load_made, report_of):
    source = GOOD + (
        "from darkbloom_core.errors import SettingsError\n"
        "@hookimpl\ndef telemetry_sinks(settings):\n    raise SettingsError('options.a.x is unknown')\n"
    )
    install("throwaway-a", {"a": "options_a"}, {"options_a": source})
    plugins = load_made()
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


def test_commands_are_added_whole_or_not_at_all_and_never_replace_one(install, load_made, report_of):
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

    plugins = load_made()
    plugins.cli_commands(app)
    assert {report.name for report in report_of(plugins).values() if report.failed} == set("bcdegi")
    assert "there is a command serve already" in report_of(plugins)["c"].reason
    assert CliRunner().invoke(app, ["serve"]).output == "the core's own\n"
    assert CliRunner().invoke(app, ["hello"]).output == "this is hello\n"
    assert CliRunner().invoke(app, ["last"]).output == "this is last\n"
    assert CliRunner().invoke(app, ["half"]).exit_code == 2
