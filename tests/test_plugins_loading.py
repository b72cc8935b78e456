"""Plugins are found, checked, loaded, blocked and reported; a broken one leaves nothing behind.

Every plugin here is a distribution of its own: a module and a dist-info folder on ``sys.path``.
"""

import importlib
import json
import logging
import os
import subprocess
import sys

import pytest
from plugin_sources import GOOD, family

from darkbloom_core.contracts import API_VERSION, PluginFailed
from darkbloom_core.errors import PluginError
from darkbloom_core.plugins import PluginOptions


def test_a_plugin_is_found_and_reported_with_its_distribution_version_hooks_and_notice(
    install, load_made, report_of
):
    install(
        "acme-llm", {"acme": "acme_llm"}, {"acme_llm": family("acme", "acme") + "notice = 'a beta'\n"}, "2.5"
    )
    report = report_of(load_made())["acme"]
    assert (report.distribution, report.version, report.state) == ("acme-llm", "2.5", "loaded")
    assert report.hooks == ("model_families",)
    assert report.notice == "a beta"
    assert report.reason is None
    assert not report.failed


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
    name, install, load_made, report_of, caplog
):
    source, state, reason = BROKEN_MODULES[name]
    install(f"throwaway-{name}", {f"b-{name}": f"broken_{name}"}, {f"broken_{name}": source})
    install(
        "throwaway-sound",
        {"a-sound": "sound_a", "c-sound": "sound_c"},
        {"sound_a": family("a", "a"), "sound_c": family("c", "c")},
    )
    plugins = load_made()
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


def test_what_an_import_cannot_find_is_named_with_what_to_install(install, load_made, report_of):
    install("throwaway-x", {"x": "needs_more"}, {"needs_more": "import surely_not_there.inner"})
    reason = report_of(load_made())["x"].reason
    assert reason == (
        "the module surely_not_there is not installed: install it, or upgrade or uninstall throwaway-x, "
        "or set DARKBLOOM_BLOCK_PLUGINS=x"
    )


def test_a_newer_minor_version_warns_and_loads(install, load_made, report_of, caplog):
    major, minor = API_VERSION
    source = family("later", "later").replace("(1, 0)", f"({major}, {minor + 1})")
    install("throwaway-later", {"later": "later_plugin"}, {"later_plugin": source})
    plugins = load_made(strict=True)
    report = report_of(plugins)["later"]
    assert report.state == "loaded"
    assert f"written for contract {major}.{minor + 1}" in report.reason
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert [found.name for found in plugins.families()] == ["later"]


def test_a_plugin_that_is_not_on_the_allow_list_is_not_even_imported(install, load_made, report_of):
    for name in ("chosen", "other"):
        install(f"throwaway-{name}", {name: f"allow_{name}"}, {f"allow_{name}": family(name, name)})
    plugins = load_made(allow=frozenset({"chosen"}))
    assert [found.name for found in plugins.families()] == ["chosen"]
    assert report_of(plugins)["other"].state == "not allowed"
    assert not report_of(plugins)["other"].failed
    assert "allow_other" not in sys.modules


def test_a_blocked_plugin_is_not_imported_even_if_it_is_allowed(install, load_made, report_of):
    install("throwaway-x", {"x": "block_x"}, {"block_x": "raise RuntimeError"})
    plugins = load_made(block=frozenset({"x"}), strict=True)
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


def test_a_name_on_a_list_that_nothing_registers_is_reported(install, load_made, report_of):
    install("throwaway-x", {"gpt-x": "listed_x"}, {"listed_x": family("x", "x")})
    plugins = load_made(allow=frozenset({"gpt-y"}), block=frozenset({"gpt-z"}))
    reports = {report.name: report for report in plugins.report()}
    assert (reports["gpt-y"].state, reports["gpt-y"].failed) == ("not installed", True)
    assert "did you mean gpt-x?" in reports["gpt-y"].reason
    assert (reports["gpt-z"].state, reports["gpt-z"].failed) == ("blocked", False)
    assert "no installed package registers such a plugin" in reports["gpt-z"].reason


def test_strict_names_every_failure_in_one_error(install, load_made):
    install("throwaway-a", {"a": "strict_a"}, {"strict_a": "raise RuntimeError('first')"})
    install("throwaway-b", {"b": "strict_b"}, {"strict_b": "api_version = (9, 0)"})
    with pytest.raises(PluginError) as raised:
        load_made(strict=True)
    assert "plugin a (throwaway-a 1.0): failed to import: RuntimeError: first" in str(raised.value)
    assert "plugin b (throwaway-b 1.0): wrong contract version" in str(raised.value)


def test_the_later_of_two_plugins_with_one_name_is_refused(install, load_made):
    install("throwaway-b", {"same": "name_b"}, {"name_b": family("b", "b")})
    install("throwaway-a", {"same": "name_a"}, {"name_a": family("a", "a")})
    plugins = load_made()
    assert [found.name for found in plugins.families()] == ["a"]
    states = [(report.distribution, report.state) for report in plugins.report() if report.name == "same"]
    assert states == [("throwaway-a", "loaded"), ("throwaway-b", "duplicate name")]


def test_damaged_metadata_of_one_package_hides_no_other(
    install, load_made, report_of, throwaway_distributions
):
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
    plugins = load_made(allow=frozenset({"sound", "attribute", "spaces", "?"}))
    states = {report.name: report.state for report in plugins.report() if report.state != "not allowed"}
    assert states == {
        "sound": "loaded",
        "attribute": "failed to import",
        "spaces": "failed to import",
        "?": "failed to import",
    }
    assert [found.name for found in plugins.families()] == ["sound"]


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(
    install, load_made, throwaway_distributions, tmp_path
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
        plugins = load_made()
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
