"""The service file under which darkbloom was installed to run, if any: whether it starts again after a failure.

deploy/ holds the files to install; docs/operations.md tells how.
"""

from __future__ import annotations

import configparser
import plistlib
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.parsers.expat import ExpatError

UNIT, AGENT = "darkbloom.service", "darkbloom.plist"
RESTARTS = ("on-failure", "always", "on-abnormal", "on-abort")
PREFIXES = "-@:+!"
"""What systemd lets stand before a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An installed service file. ``problem`` says what is wrong with it."""

    path: Path
    problem: str | None


def installed_services(root: Path, home: Path) -> tuple[Service, ...]:
    """The service files of systemd and launchd under ``root`` and ``home``."""
    places = (
        root / "etc/systemd/system" / UNIT,
        home / ".config/systemd/user" / UNIT,
        root / "Library/LaunchDaemons" / AGENT,
        home / "Library/LaunchAgents" / AGENT,
    )
    return tuple(Service(path=path, problem=service_problem(path)) for path in places if path.is_file())


def service_problem(path: Path) -> str | None:
    """What is wrong with a unit of systemd, or a property list of launchd; None if it will do."""
    try:
        command, restarts = (_launchd if path.suffix == ".plist" else _systemd)(path)
    except (configparser.Error, ExpatError, ValueError, OSError) as error:
        return f"it cannot be read: {error}"
    if not command:
        return "it says no command to run"
    if shutil.which(command[0]) is None:
        return f"its command {command[0]} is no program here"
    return None if restarts else "it does not start darkbloom again after a failure"


def _systemd(path: Path) -> tuple[Sequence[str], bool]:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#;")
    unit.read_string(path.read_text(encoding="utf-8"))
    service = unit["Service"] if unit.has_section("Service") else {}
    command = shlex.split(service.get("ExecStart", "").lstrip(PREFIXES))
    return command, service.get("Restart", "no") in RESTARTS


def _launchd(path: Path) -> tuple[Sequence[str], bool]:
    job = plistlib.loads(path.read_bytes())
    if not isinstance(job, dict):
        raise ValueError("a job is a dictionary")
    command, keep = job.get("ProgramArguments", []), job.get("KeepAlive", False)
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise ValueError("ProgramArguments is a list of strings")
    restarts = keep.get("SuccessfulExit") is False if isinstance(keep, dict) else keep is True
    return command, restarts
