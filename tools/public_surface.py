"""Write tests/public_surface.txt: ``uv run python tools/public_surface.py``.

It holds what plugins may rely on. A test fails if the file and the code differ, so that
nobody changes the contract by accident.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "public_surface.txt"

PINNED = ("contracts", "hookspecs", "errors", "checkpoint", "experts")
"""Modules that are pinned with the shape of everything in them; of the others only the names exist."""

PREFIX = r"\b(darkbloom_core|typing|collections|pluggy)\.([\w]+\.)*"


def surface() -> str:
    """The whole file."""
    lines = ["The public surface of darkbloom_core, written by tools/public_surface.py.", "", "modules"]
    lines += [f"  darkbloom_core.{name}" for name in modules()]
    for name in PINNED:
        module = importlib.import_module(f"darkbloom_core.{name}")
        lines += ["", f"darkbloom_core.{name}"]
        for member in exported(module):
            lines += [f"  {line}" for line in describe(member, getattr(module, member))]
    return "\n".join(lines) + "\n"


def modules() -> list[str]:
    """The modules of the core that anybody may import."""
    files = (ROOT / "darkbloom_core").iterdir()
    names = {file.stem for file in files if file.suffix == ".py" or (file / "__init__.py").exists()}
    return sorted(name for name in names if not name.startswith("_"))


def exported(module: ModuleType) -> list[str]:
    """What a module exports; of one without ``__all__``, what it defines itself."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return sorted(defined + [target.id for target in targets if isinstance(target, ast.Name)])


def describe(name: str, value: object) -> Iterator[str]:
    """One line for ``name``, and one for each part of it that a plugin sees."""
    if isinstance(value, type) and issubclass(value, Exception):
        status, code = getattr(value, "status", "none"), getattr(value, "code", "none")
        yield f"class {name}({value.__base__.__name__ if value.__base__ else ''}): status {status}, code {code}"
    elif isinstance(value, type):
        yield f"class {name}"
        yield from (f"  {line}" for line in _members(value))
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    else:
        words = (
            [word.__name__ for word in value] if name == "EVENT_TYPES" and isinstance(value, tuple) else value
        )
        yield f"{name} = {_without_modules(str(words))}"


def _members(kind: type) -> Iterator[str]:
    fields = (
        {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    )
    for field in fields.values():
        optional = field.default is not MISSING or field.default_factory is not MISSING
        yield f"{field.name}: {field.type}" + (" = ..." if optional else "")
    for name, value in vars(kind).items():
        constructs = name == "__init__" and not fields and value.__qualname__.startswith(kind.__name__)
        if name in fields or (name.startswith("_") and not constructs):
            continue
        if isinstance(value, property) and value.fget:
            yield f"{name}: {inspect.signature(value.fget).return_annotation} (property)"
        elif inspect.isfunction(value):
            yield f"{name}{_signature(value)}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{name}{_signature(value.__func__)}"


def _signature(function: Callable[..., object]) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    return re.sub(r"= <[^>]*>+[^,)]*", "= ...", text)


def _without_modules(text: str) -> str:
    """``text`` without the places where types are defined, which may move."""
    return re.sub(r"<([\w.]+) object[^>]*>", r"\1", re.sub(PREFIX, "", text))


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
