"""From the engine's events to Anthropic's: one block after another, and a message that is their fold.

https://docs.anthropic.com/en/docs/build-with-claude/streaming gives the order of events.
Always true: a ``tool_use`` block holds a JSON object. A call is therefore told only when it
is complete; what is no object is shown as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic_core import from_json

from darkbloom_core.contracts import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import OutputEnd, OutputEvent, Usage
from darkbloom_core.errors import DarkbloomError
from darkbloom_core.server import ErrorAnswer, error_answer
from darkbloom_dialects._endpoint import Event

DELTAS_PER_PING = 32
"""After so many deltas of which nothing was told the client gets a sign of life."""

_json = json.JSONEncoder(separators=(",", ":")).encode

SIGNATURE = "unsigned"
"""Thoughts carry a signature in this dialect. Nothing checks ours."""

_ERROR_TYPES: Mapping[str, str] = {
    "model_not_found": "not_found_error",
    "route_not_found": "not_found_error",
    "body_too_large": "request_too_large",
    "deadline_exceeded": "timeout_error",
    "authentication_error": "authentication_error",
    "permission_error": "permission_error",
    "rate_limit_error": "rate_limit_error",
    "service_unavailable_error": "overloaded_error",
    "server_error": "api_error",
}
"""The dialect's word for a code or a type of the core's; ``invalid_request_error`` for all others."""


def error_body(answer: ErrorAnswer) -> dict[str, Any]:
    """An error in the shape of Anthropic's API."""
    kind = _ERROR_TYPES.get(answer.code) or _ERROR_TYPES.get(answer.type) or "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": answer.message}}


class MessageAnswer:
    """One message. ``shows_thinking`` False leaves out what the model thinks; its tokens are counted all the same."""

    def __init__(self, *, model: str, prompt_tokens: int, shows_thinking: bool) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._shows_thinking = shows_thinking
        self._blocks = 0
        self._open: Literal["text", "thinking"] | None = None
        self._call: tuple[str, list[str]] | None = None
        self._last_call = -1
        self._called = False
        self._untold = 0

    def opening(self) -> Sequence[Event]:
        message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": _usage(Usage(prompt_tokens=self._prompt_tokens)),
        }
        return ({"type": "message_start", "message": message},)

    def of(self, event: OutputEvent) -> Sequence[Event]:
        if isinstance(event, OutputEnd):
            return list(self._end(event))
        return [told for delta in event.deltas for told in self._delta(delta)]

    def failed(self, error: DarkbloomError) -> Sequence[Event]:
        return (error_body(error_answer(error)),)

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        return folded(events)

    def _delta(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ContentDelta):
            yield from self._text("text", delta.text)
        elif isinstance(delta, ReasoningDelta):
            if self._shows_thinking:
                yield from self._text("thinking", delta.text)
            else:
                yield from self._wait()
        elif isinstance(delta, ToolCallDelta):
            yield from self._call_piece(delta)

    def _text(self, kind: Literal["text", "thinking"], text: str) -> Iterator[Event]:
        if not text:
            return
        yield from self._end_call()
        if self._open != kind:
            yield from self._close()
            self._open = kind
            empty = {"signature": ""} if kind == "thinking" else {}
            yield self._start({"type": kind, kind: "", **empty})
        yield self._piece({"type": f"{kind}_delta", kind: text})

    def _call_piece(self, delta: ToolCallDelta) -> Iterator[Event]:
        if delta.index > self._last_call:
            yield from self._end_call()
            self._last_call = delta.index
            self._call = (delta.name or "", [])
        if self._call is None:  # its call is told already: what comes late is not lost
            yield from self._text("text", delta.arguments)
        else:
            self._call[1].append(delta.arguments)
            yield from self._wait()

    def _end_call(self, *, cut: bool = False) -> Iterator[Event]:
        if self._call is None:
            return
        name, pieces = self._call
        self._call = None
        text = "".join(pieces)
        arguments = _arguments(text, cut)
        if arguments is None:
            yield from self._text("text", f"{name}({text})")
            return
        yield from self._close()
        self._called = True
        block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
        yield self._start(block)
        yield self._piece({"type": "input_json_delta", "partial_json": arguments})
        yield self._stop()

    def _end(self, end: OutputEnd) -> Iterator[Event]:
        yield from self._end_call(cut=end.reason == "length")
        if self._blocks == 0:
            self._open = "text"
            yield self._start({"type": "text", "text": ""})
        yield from self._close()
        reason = self._stop_reason(end)
        delta = {"stop_reason": reason, "stop_sequence": end.stop_string, "stop_details": None}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(end.usage)}
        yield {"type": "message_stop"}

    def _stop_reason(self, end: OutputEnd) -> str:
        if end.reason == "length":
            return "max_tokens"
        if end.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _wait(self) -> Iterator[Event]:
        self._untold += 1
        if self._untold % DELTAS_PER_PING == 0:
            yield {"type": "ping"}

    def _start(self, block: dict[str, Any]) -> Event:
        self._blocks += 1
        return {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _piece(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._blocks - 1}

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._piece({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        yield self._stop()


def folded(events: Iterable[Event]) -> dict[str, Any]:
    """The message that the events of a complete stream tell."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "message_start":
            message = dict(event["message"])
        elif event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            _add(blocks[event["index"]], event["delta"])
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    return {**message, "content": blocks}


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["input"] = from_json(delta["partial_json"])
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        block[block["type"]] += delta[block["type"]]


def _arguments(text: str, cut: bool) -> str | None:
    """The text of a JSON object, of one that was ``cut`` off what is complete of it; None if it is no object."""
    if not text.strip(" \t\r\n"):
        return "{}"
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial=cut)
    except ValueError:
        return None
    return _json(value) if isinstance(value, dict) else None


def _usage(usage: Usage) -> dict[str, Any]:
    """``input_tokens`` are those of the prompt that were not found in a cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
