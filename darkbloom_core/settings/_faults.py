"""What is wrong with a setting, in one line: its name, where it stands, and what was probably meant."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from darkbloom_core.settings._tables import FREE_TABLES, SETTINGS, TABLES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LONGEST_VALUE = 60

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "model": "a table",
    "dict": "a table",
}


def describe_fault(fault: ErrorDetails, where: str) -> str:
    """One line for a fault that pydantic found in values that stand ``where``."""
    location = tuple(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {'.'.join(location)} {where}: {suggestion(location)}"
    return f"{'.'.join(location)} {where} {complaint(fault)}"


def complaint(fault: ErrorDetails) -> str:
    """What the value must be, and what came."""
    kind, limits = fault["type"], fault.get("ctx", {})
    match kind:
        case "greater_than_equal":
            must = f"be at least {limits['ge']}"
        case "greater_than":
            must = f"be greater than {limits['gt']}"
        case "less_than_equal":
            must = f"be at most {limits['le']}"
        case "string_too_short":
            must = "not be empty"
        case "origin":
            must = fault["msg"]
        case _:
            name = kind if kind in _KINDS else kind.split("_")[0]
            if name not in _KINDS:
                return f"is not right: {fault['msg']}"
            must = f"be {_KINDS[name]}"
    came = repr(fault["input"])
    return f"must {must}, not {came if len(came) <= LONGEST_VALUE else came[:LONGEST_VALUE] + '...'}"


def suggestion(location: tuple[str, ...]) -> str:
    """The setting that was probably meant, or what there is."""
    table, key = location[0], location[-1]
    if len(location) == 1:
        if near := difflib.get_close_matches(table, [*TABLES, *FREE_TABLES], n=1):
            return f"did you mean the table [{near[0]}]?"
    elif table in TABLES and (near := difflib.get_close_matches(key, TABLES[table].model_fields, n=1)):
        return f"did you mean {table}.{near[0]}?"
    keys = [key for _, key in SETTINGS]
    if near := difflib.get_close_matches(key, keys, n=1):
        return f"did you mean {'.'.join(next(known for known in SETTINGS if known[1] == near[0]))}?"
    if table in TABLES:
        return f"[{table}] has {', '.join(TABLES[table].model_fields)}"
    return f"there are the tables {', '.join([*TABLES, *FREE_TABLES])}"
