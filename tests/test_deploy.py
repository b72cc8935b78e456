"""The service files that are shipped restart after a failure, and the doctor tells good ones from bad ones."""

from __future__ import annotations

import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from darkbloom_core.cli._service import installed_services, service_problem

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
UNIT, AGENT = DEPLOY / "darkbloom.service", DEPLOY / "darkbloom.plist"
PROGRAMS = {UNIT: "/opt/darkbloom/bin/darkbloom", AGENT: "/Users/me/darkbloom/bin/darkbloom"}


def with_a_real_program(source: Path, target: Path) -> Path:
    """A copy of ``source`` whose command is a program of this machine."""
    text = source.read_text()
    assert text.count(PROGRAMS[source]) == 1
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text.replace(PROGRAMS[source], sys.executable))
    return target


@pytest.mark.parametrize("source", [UNIT, AGENT], ids=lambda path: path.name)
def test_a_shipped_file_needs_only_its_program(source, tmp_path):
    assert service_problem(source) == f"its command {PROGRAMS[source]} is no program here"
    assert service_problem(with_a_real_program(source, tmp_path / source.name)) is None


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (UNIT, "Restart=on-failure", "Restart=no"),
        (UNIT, "Restart=on-failure", "# Restart=on-failure"),
        (AGENT, "<key>SuccessfulExit</key>\n        <false/>", "<key>SuccessfulExit</key>\n        <true/>"),
        (AGENT, "<key>KeepAlive</key>", "<key>Other</key>"),
    ],
)
def test_a_file_that_does_not_restart_is_pointed_out(source, good, bad, tmp_path):
    file = with_a_real_program(source, tmp_path / source.name)
    assert good in file.read_text()
    file.write_text(file.read_text().replace(good, bad))
    assert service_problem(file) == "it does not start darkbloom again after a failure"


@pytest.mark.parametrize("name", [UNIT.name, AGENT.name])
@pytest.mark.parametrize(
    "content",
    [
        b"", b"junk", b"[Service", b"<plist", b"\xff\xfe\xff", b"[Service]\nRestart=always\n",
        b"[Service]\nExecStart='python\nRestart=always\n", b"<plist><array/></plist>",
        b"<plist><dict><key>ProgramArguments</key><string>python</string></dict></plist>",
        b"<plist><dict><key>ProgramArguments</key><array><true/></array></dict></plist>",
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_a_problem_and_no_crash(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert service_problem(tmp_path / name)


def test_a_file_that_cannot_be_read_is_a_problem_and_no_crash(tmp_path):
    (tmp_path / UNIT.name).mkdir()
    assert service_problem(tmp_path / UNIT.name).startswith("it cannot be read")


@pytest.mark.parametrize("more", ["Restart=on-failure", "ExecStart=python 100% a:b", "ExecStart=-python x"])
def test_what_systemd_understands_is_no_problem(more, tmp_path):
    (tmp_path / UNIT.name).write_text(f"[Service]\nExecStart=python --x\nRestart=always\n{more}\n")
    assert service_problem(tmp_path / UNIT.name) is None


def test_files_are_found_where_systemd_and_launchd_look(tmp_path):
    root, home = tmp_path / "root", tmp_path / "home"
    assert installed_services(root, home) == ()
    files = [
        with_a_real_program(UNIT, root / "etc/systemd/system/darkbloom.service"),
        with_a_real_program(UNIT, home / ".config/systemd/user/darkbloom.service"),
        with_a_real_program(AGENT, root / "Library/LaunchDaemons/darkbloom.plist"),
        with_a_real_program(AGENT, home / "Library/LaunchAgents/darkbloom.plist"),
    ]
    found = installed_services(root, home)
    assert [(service.path, service.problem) for service in found] == [(file, None) for file in files]


def test_the_agent_starts_at_login_and_gets_time_to_drain():
    job = plistlib.loads(AGENT.read_bytes())
    assert job["Label"] == "darkbloom"
    assert job["RunAtLoad"] is True
    assert job["ExitTimeOut"] > 30  # server.drain_seconds


def test_systemd_gives_time_to_drain_and_does_not_repeat_what_cannot_work():
    lines = UNIT.read_text().splitlines()
    assert {"TimeoutStopSec=40", "RestartPreventExitStatus=2", "WantedBy=multi-user.target"} <= set(lines)


@pytest.mark.system
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    file = with_a_real_program(UNIT, tmp_path / UNIT.name)
    done = subprocess.run(
        ["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
