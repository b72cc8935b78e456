"""Write docs/settings.md from the settings model: ``uv run python tools/settings_reference.py``.

A test fails if the page and the model differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from darkbloom_core.settings import RESERVED, Settings, variable_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

INTRODUCTION = """\
<!-- Made by tools/settings_reference.py from darkbloom_core/settings/_model.py; change it there. -->
# Settings

Settings come from one TOML file and from the environment; a variable wins over the file. The file is
the one given with `--config`, else the one that `DARKBLOOM_CONFIG` names, else
`~/.config/darkbloom/darkbloom.toml` if it is there. The variable of a setting is
`DARKBLOOM_<TABLE>__<KEY>`, with two underscores between; lists are written with commas between.

A name that is not a setting, in the file or in the environment, is an error that says where it stands
and which one was probably meant. So is a value of the wrong type or out of range.

```toml
[server]
port = 8000
route_plugins = ["otel"]

[models]
assistant = "/models/assistant-20b"

[options.otel]
endpoint = "http://127.0.0.1:4318"
```
"""

FREE = """
## Tables whose keys you choose

| table | what stands in it | as a variable |
|---|---|---|
| `[models]` | {models} | `DARKBLOOM_MODELS__ASSISTANT=/models/assistant-20b` |
| `[max_rows]` | {max_rows} | `DARKBLOOM_MAX_ROWS__ASSISTANT=4` |
| not in the file | {keys} | `DARKBLOOM_KEYS__ALICE=...` |
| `[options.PLUGIN]` | {options} | `DARKBLOOM_OPTIONS__OTEL__ENDPOINT=http://127.0.0.1:4318` |

A variable means the name in lower case; where the file has that name with `-` in place of `_`, it means that one.
"""


def page() -> str:
    """The whole page, as it must stand in docs/settings.md."""
    parts = [INTRODUCTION]
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts.append(_table(name, field.annotation))
    fields = Settings.model_fields
    free = {name: fields[name].description for name in ("models", "max_rows", "keys", "options")}
    parts.append(FREE.format(**free))
    parts.append("\n## Variables that are not settings\n\n| variable | meaning |\n|---|---|\n")
    parts.extend(f"| `{variable}` | {meaning} |\n" for variable, meaning in RESERVED.items())
    return "".join(parts)


def _table(name: str, model: type[BaseModel]) -> str:
    lines = [f"\n## [{name}]\n", (model.__doc__ or "").strip(), ""]
    lines += ["| key | type | default | meaning | variable |", "|---|---|---|---|---|"]
    for key, field in model.model_fields.items():
        lines.append(
            f"| `{key}` | {_kind(field)} | {_default(field)} | {field.description} | `{variable_name(name, key)}` |"
        )
    return "\n".join(lines) + "\n"


def _kind(field: FieldInfo) -> str:
    """The type in words, with its limits."""
    text = getattr(field.annotation, "__name__", str(field.annotation)) if field.annotation else "?"
    if "tuple" in str(field.annotation):
        text = "list of texts"
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}
    words = names.get(text) or names.get(str(field.annotation).split(" | ")[0]) or text
    limits = [
        f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}"
        for constraint in field.metadata
        for attribute, sign in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
        if (value := getattr(constraint, attribute, None)) is not None
    ]
    return ", ".join([words, *limits])


def _default(field: FieldInfo) -> str:
    if field.default is None:
        return "none"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{re.sub(r'[.]0$', '', json.dumps(value))}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
