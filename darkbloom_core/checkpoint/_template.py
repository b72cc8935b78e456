"""A checkpoint's own chat template, rendered in a sandbox straight to token ids.

Always true: control tokens in the result come from the template alone. Text that a client
sent never becomes one, nor do pieces of one that the template puts side by side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from darkbloom_core.checkpoint._config import present, read_json, read_text
from darkbloom_core.checkpoint._tokenizer import TextTokenizer
from darkbloom_core.errors import CheckpointError, InvalidRequest, UnsupportedCheckpoint

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_MARK = "__mark__"


class ChatTemplate:
    """The template of the checkpoint folder ``path``. Thread-safe.

    Read from ``chat_template.jinja``, else ``chat_template.json``, else the
    ``chat_template`` of ``tokenizer_config.json`` (text, or a list of named ones: then
    ``tool_use`` serves conversations with tools and ``default`` all others). Templates see
    what transformers offers them. Raises ``CheckpointError`` naming the file if there is
    none or it is not a template.
    """

    def __init__(self, path: Path, tokenizer: TextTokenizer) -> None:
        if short := [name for name in tokenizer.control_names if len(name) < 2]:
            raise UnsupportedCheckpoint(
                f"{tokenizer.file}: the control token {short[0]!r} cannot be told from text"
            )
        self._tokenizer = tokenizer
        self._controls = _either(tokenizer.control_names)
        self._breaks = _Breaks(tokenizer.control_names)
        self.file, self.sources = _read_sources(path)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in self.sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{self.file}: not a chat template ({error.message}, line {error.lineno})"
            ) from error

    def render(
        self,
        variables: Mapping[str, Any],
        *,
        trusted: Mapping[str, Any] | None = None,
        today: date | None = None,
        edit: Callable[[str], str] | None = None,
    ) -> tuple[int, ...]:
        """Render and tokenise. Every string in ``variables``, keys included, is taken for a client's.

        Only ``trusted`` may carry control tokens; ``bos_token`` and its like are there
        already. So may what ``edit`` puts into the text after it is rendered: a control token
        that it finds there is the template's, never a client's. ``today`` is what the template is told if it asks for the date. Raises
        ``InvalidRequest`` if the template refuses the conversation.
        """
        today = today or date.today()
        strings = [*_strings(variables), *self.sources.values()]
        mark = _unused_character(strings)
        context = {name: self._breaks.protect(value, mark) for name, value in variables.items()}
        context |= {**self._tokenizer.special_tokens, **(trusted or {})}
        context |= {_MARK: mark, "strftime_now": today.strftime}
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        try:
            text = self._templates[name].render(context)
        except InvalidRequest as refusal:
            raise InvalidRequest(refusal.message.replace(mark, ""), param="messages") from None
        except Exception as error:  # a template can raise whatever Python code can
            message = str(error).replace(mark, "")
            raise InvalidRequest(
                f"the model's chat template cannot render this conversation ({message})", param="messages"
            ) from error
        return self._encode(text if edit is None else edit(text), mark)

    def _encode(self, text: str, mark: str) -> tuple[int, ...]:
        ids: list[int] = []
        pieces = self._controls.split(text)  # ordinary text at even places, control tokens at odd ones
        for place in range(0, len(pieces), 2):
            ordinary = pieces[place]
            if place > 0:
                ids.append(self._tokenizer.require_control_id(pieces[place - 1]))
                if self._tokenizer.strips[pieces[place - 1]][1]:
                    ordinary = ordinary.lstrip()
            if place + 1 < len(pieces) and self._tokenizer.strips[pieces[place + 1]][0]:
                ordinary = ordinary.rstrip()
            if ordinary:
                ids.extend(self._tokenizer.encode_text(ordinary.replace(mark, "")))
        return tuple(ids)


class _Breaks:
    """Puts a mark into text wherever it is a control token, or could become one next to other text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._starts = re.compile(f"(?={_either(names).pattern}).", re.DOTALL)  # overlapping ones as well
        self._heads = _either({name[:length] for name in names for length in range(1, len(name))}, end=r"\Z")
        self._tails = _either({name[length:] for name in names for length in range(1, len(name))})

    def protect(self, value: Any, mark: str) -> Any:
        """``value`` with every string in it, at any depth, broken up by ``mark``."""
        if isinstance(value, str):
            return self._protect_text(value, mark)
        if isinstance(value, Mapping):
            return {self.protect(key, mark): self.protect(each, mark) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(each, mark) for each in value]
        return value

    def _protect_text(self, text: str, mark: str) -> str:
        starts_as_tail = self._tails.match(text) is not None
        ends_as_head = self._heads.search(text) is not None
        text = self._starts.sub(lambda found: found[0] + mark, text)
        return f"{mark if starts_as_tail else ''}{text}{mark if ends_as_head else ''}"


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model said, for training; for us it is only its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes. The mark is never escaped, so that it can be taken out again."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        mark = context[_MARK]
        text = re.sub(
            r"[^\x00-\x7e]", lambda found: found[0] if found[0] == mark else json.dumps(found[0])[1:-1], text
        )
    return text


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(str(message))


def _read_sources(path: Path) -> tuple[Path, dict[str, str]]:
    file = path / "chat_template.jinja"
    if present(file):
        return file, {"default": read_text(file)}
    for file in (path / "chat_template.json", path / "tokenizer_config.json"):
        found = read_json(file).get("chat_template") if present(file) else None
        if isinstance(found, str):
            return file, {"default": found}
        if isinstance(found, list):
            return file, _named_sources(file, found)
    raise CheckpointError(
        f"{path / 'chat_template.jinja'}: no such file, and tokenizer_config.json has no chat_template"
    )


def _named_sources(file: Path, entries: list[Any]) -> dict[str, str]:
    sources = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    if "default" not in sources:
        raise CheckpointError(f"{file}: chat_template is a list without a template named default")
    return sources


def _either(texts: frozenset[str] | set[str], end: str = "") -> re.Pattern[str]:
    """A pattern with one group that matches any of ``texts``, the longest first."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'}){end}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)


def _unused_character(strings: list[str]) -> str:
    used = set().union(*map(set, strings))
    for block in _PRIVATE_USE:
        for code in block:
            if chr(code) not in used:
                return chr(code)
    raise InvalidRequest("the conversation uses every private-use character of Unicode", param="messages")
