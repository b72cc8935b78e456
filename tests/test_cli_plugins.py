"""`darkbloom plugins` and `--strict-plugins`: a broken plugin is named and breaks nothing else."""

from __future__ import annotations

import json

import pytest

BROKEN = "raise RuntimeError('the disk is on fire')\n"
FAILS_WHEN_ASKED = (
    "from darkbloom_core.hookspecs import hookimpl\n"
    "api_version = (1, 0)\n"
    "@hookimpl\n"
    "def checkpoints():\n"
    "    raise RuntimeError('no checkpoints today')\n"
)


def test_plugins_are_listed_with_package_version_hooks_and_state(run_darkbloom) -> None:
    listed = {plugin["name"]: plugin for plugin in json.loads(run_darkbloom("plugins", "--json").stdout)}
    demo = listed["demo"]
    assert (demo["distribution"], demo["state"], demo["reason"]) == ("darkbloom-demo", "loaded", None)
    assert demo["version"]
    assert "checkpoints" in demo["hooks"]
    table = run_darkbloom("plugins").stdout
    for plugin in listed.values():
        assert plugin["name"] in table
        assert plugin["distribution"] in table


def test_a_plugins_notice_is_shown(run_darkbloom, make_plugin) -> None:
    make_plugin("noted", 'api_version = (1, 0)\nnotice = "not available on this platform"\n')
    listed = {plugin["name"]: plugin for plugin in json.loads(run_darkbloom("plugins", "--json").stdout)}
    assert listed["noted"]["notice"] == "not available on this platform"
    assert "noted: not available on this platform\n" in run_darkbloom("plugins").stdout


@pytest.mark.parametrize(
    ("source", "reason"), [(BROKEN, "the disk is on fire"), (FAILS_WHEN_ASKED, "no checkpoints today")]
)
def test_a_broken_plugin_is_named_with_its_reason_and_breaks_no_other(
    run_darkbloom, make_plugin, source, reason
) -> None:
    make_plugin("broken", source)
    done = run_darkbloom("plugins", "--json")
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    assert listed["broken"]["distribution"] == "darkbloom-broken"
    assert reason in listed["broken"]["reason"]
    assert {plugin["state"] for name, plugin in listed.items() if name != "broken"} == {"loaded"}
    assert sum("plugin broken" in line for line in done.stderr.splitlines()) == 1
    assert f"broken: {listed['broken']['reason']}\n" in run_darkbloom("plugins").stdout


def test_strict_turns_a_failure_into_exit_code_1_and_still_lists(run_darkbloom, make_plugin) -> None:
    run_darkbloom("plugins", "--strict-plugins")
    make_plugin("broken", BROKEN)
    assert "broken" in run_darkbloom("plugins", "--strict-plugins", code=1).stdout
    assert "broken" in run_darkbloom("serve", "--demo", "--strict-plugins", code=1).stderr.splitlines()[-1]


def test_a_blocked_plugin_is_no_failure(run_darkbloom, make_plugin, process_environment) -> None:
    make_plugin("broken", BROKEN)
    process_environment["DARKBLOOM_BLOCK_PLUGINS"] = "broken"
    assert run_darkbloom("plugins", "--strict-plugins").stderr == ""
