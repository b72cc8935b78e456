"""The core's rooms: who may import whom, by which door, and what must never stand in them."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "darkbloom_core"

ROOMS = {
    "contracts": set(),
    "errors": set(),
    "settings": {"errors"},
    "hookspecs": {"contracts", "errors", "settings", "plugins"},
    "plugins": {"contracts", "errors", "settings", "hookspecs"},
    "telemetry": {"contracts", "errors"},
    "checkpoint": {"contracts", "errors"},
    "memory": {"contracts", "errors"},
    "prefix": {"contracts", "errors", "memory"},
    "engine": {"contracts", "errors", "memory", "prefix"},
    "grammar": {"contracts", "errors"},
    "slots": {
        "contracts", "errors", "settings", "hookspecs", "plugins", "telemetry", "checkpoint", "memory", "prefix", "engine",
        "grammar",
    },
    "media": {"contracts", "errors", "settings", "memory"},
    "server": {
        "contracts", "errors", "settings", "hookspecs", "plugins", "telemetry", "checkpoint", "memory", "prefix", "engine",
        "grammar", "slots", "media",
    },
    "cli": {
        "contracts", "errors", "settings", "hookspecs", "plugins", "telemetry", "checkpoint", "memory", "prefix", "engine",
        "grammar", "slots", "media", "server",
    },
    "experts": set(),
    "fused": set(),
}  # fmt: skip
"""A room, and the rooms that it may import. docs/architecture.md has the same table, with reasons."""

FAMILIES = ("gpt[_-]?oss", "gemma", "harmony", "qwen", "llama", "mistral", "deepseek")

HEAVY = (
    "mlx",
    "mlx_lm",
    "mlx_vlm",
    "transformers",
    "torch",
    "numpy",
    "starlette",
    "pydantic",
    "typer",
    "llguidance",
)


def room_of(path):
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imports(path, package):
    """(line, dotted module) of every import in a file, those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, module]).rstrip(".")
            yield node.lineno, module
            if module == "darkbloom_core":  # "from darkbloom_core import x" may name a room
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def sources(folder):
    return sorted(path for path in folder.rglob("*.py") if not {"tests", "__pycache__"} & set(path.parts))


CORE_FILES = sources(CORE)
PLUGIN_FILES = [
    path for folder in sorted((ROOT / "plugins").glob("*/darkbloom_*")) for path in sources(folder)
]


def named(path):
    return str(path.relative_to(ROOT))


def test_every_room_is_in_the_table():
    rooms = {room_of(path) for path in CORE_FILES} - {"__init__", "__main__"}
    assert rooms <= ROOMS.keys(), (
        f"{sorted(rooms - ROOMS.keys())} is no room: put the code into one of {sorted(ROOMS)}, or, if the core really "
        "needs another room, add it to ROOMS here and to the table of docs/architecture.md"
    )


def test_the_architecture_page_has_the_same_table():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| .+ \| (.+) \|$", page.partition("\n## Rooms")[2], re.MULTILINE
    )
    told, above = {}, set()
    for names, allowed in rows:
        together = set(re.findall(r"\w+", names))
        listed = set(re.findall(r"\w+", allowed))
        rooms = {"nothing of ours": set(), "all above": above}.get(allowed, listed)
        told |= {name: rooms | (together - {name}) for name in together}
        above = above | together
    assert told == ROOMS, "docs/architecture.md and ROOMS in this file differ: change both"


@pytest.mark.parametrize("path", CORE_FILES, ids=named)
def test_a_room_imports_only_rooms_above_it_and_by_their_doors(path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    room = room_of(path)
    for line, module in imports(path, package):
        parts = module.split(".")
        if parts[0] != "darkbloom_core":
            assert not parts[0].startswith("darkbloom_"), (
                f"{named(path)}:{line} imports a plugin: the core knows none"
            )
            continue
        if len(parts) == 1 or parts[1] == room or parts[1] == "__version__" or room == "__init__":
            continue
        assert parts[1] in ROOMS[room], (
            f"{named(path)}:{line} imports {module}, but {room} may import {sorted(ROOMS[room]) or 'no other room'}: "
            "take what is needed as an argument, or move the code to the room that may know both "
            "(the table is in docs/architecture.md)"
        )
        assert len(parts) == 2, (
            f"{named(path)}:{line} imports {module}, which is inside another room: import it from "
            f"darkbloom_core.{parts[1]}, and export it there if others need it"
        )


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=named)
def test_a_plugin_uses_nothing_of_the_core_that_a_stranger_could_not(path):
    package = ".".join(path.relative_to(ROOT).parent.parts[2:])
    own = package.split(".")[0]
    for line, module in imports(path, package):
        parts = module.split(".")
        if parts[0] == "darkbloom_core":
            assert len(parts) <= 2, (
                f"{named(path)}:{line} imports {module}, which is private: use darkbloom_core.{parts[1]}, and if "
                "that lacks something, the contract lacks it: add it there"
            )
        else:
            assert parts[0] == own or not parts[0].startswith("darkbloom_"), (
                f"{named(path)}:{line} imports another plugin: plugins know only the core"
            )


def test_no_family_is_named_in_the_core():
    pattern = re.compile("|".join(FAMILIES), re.IGNORECASE)
    for path in sorted(CORE.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        assert not pattern.search(named(path)), (
            f"{named(path)}: a file of the core is named after a model family"
        )
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = pattern.search(line)
            assert found is None, (
                f"{named(path)}:{number} names {found[0]!r}: the core knows no model by name. What differs between "
                "families belongs into their plugins, behind the contract"
            )


def calls(path, method):
    """The lines on which the method of this name is called, as source text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        ast.unparse(node.func)
        for node in found
        if isinstance(node.func, ast.Attribute) and node.func.attr == method
    ]


def test_there_is_one_engine_and_one_way_into_it():
    for path in CORE_FILES:
        if calls(path, "run_layers"):
            assert room_of(path) == "engine", f"{named(path)} runs a model's layers past the engine"
        entries = [call for call in calls(path, "submit") if call.endswith("engine.submit")]
        assert not entries or path == CORE / "server" / "_service.py", (
            f"{named(path)} submits to an engine: every request of a server enters through GenerationService"
        )


@pytest.mark.parametrize("path", [*CORE_FILES, *PLUGIN_FILES], ids=named)
def test_every_file_says_what_it_is_for(path):
    text = path.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text)), (
        f"{named(path)} needs a first docstring: what it is for in a sentence or two, and what is always true of it"
    )


@pytest.mark.parametrize("module", ["contracts", "errors", "hookspecs", "plugins", "telemetry"])
def test_what_every_command_and_every_plugin_imports_is_light(module):
    script = (
        f"import sys, darkbloom_core.{module}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
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
    heavy = set(HEAVY) & set(done.stdout.split())
    assert not heavy, (
        f"importing darkbloom_core.{module} imports {sorted(heavy)}, which makes every command slow: import it inside "
        "the function that needs it, or under TYPE_CHECKING"
    )
