"""From the engine's events to OpenAI's answers, streamed or whole.

An output becomes a sequence of pieces. A stream sends the pieces; a whole answer is their
fold. There is no other way from an event to an answer, so the two always agree.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from darkbloom_core.contracts import ChatCodec, ContentDelta, Delta, FinishReason, Malformed, ReasoningDelta
from darkbloom_core.engine import (
    OutputDelta,
    OutputEnd,
    OutputEvent,
    PlainParser,
    TextPipeline,
    TokenLogprob,
    Usage,
)

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say."""

_json = json.JSONEncoder(separators=(",", ":")).encode
"""Compact, and plain ASCII: some clients split lines at every character that Unicode calls a line end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one choice. ``delta`` holds only what is new: absent keys are left out.

    ``logprobs`` has an entry for each token, in the order of the output; None if there are none.
    """

    delta: dict[str, Any]
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: FinishReason | None = None


class Pieces(Protocol):
    """Cuts one output into pieces. Keeps the state of that output and of no other."""

    def opening(self) -> Sequence[Piece]:
        """What comes before any output."""
        ...

    def of(self, event: OutputEvent) -> Sequence[Piece]:
        """What ``event`` brings; the last of an ``OutputEnd`` carries the finish reason."""
        ...


class ChatPieces:
    """Pieces of a chat completion: content, reasoning and tool calls."""

    def __init__(self, codec: ChatCodec, *, with_logprobs: bool) -> None:
        self._codec = codec
        self._with_logprobs = with_logprobs
        self._calls: set[int] = set()
        self._said_content = False

    def opening(self) -> Sequence[Piece]:
        return (Piece({"role": "assistant"}),)

    def of(self, event: OutputEvent) -> Sequence[Piece]:
        return (self._last(event.reason),) if isinstance(event, OutputEnd) else self._pieces(event)

    def _last(self, reason: FinishReason) -> Piece:
        """An answer without text and without calls is an empty text, not nothing."""
        delta = {} if self._calls or self._said_content else {"content": ""}
        return Piece(delta, finish_reason=reason)

    def _pieces(self, event: OutputDelta) -> Sequence[Piece]:
        deltas: list[dict[str, Any]] = []
        for delta in event.deltas:
            if isinstance(delta, ContentDelta):
                self._said_content = True
                deltas.append({"content": delta.text})
            elif isinstance(delta, ReasoningDelta):
                deltas.append({"reasoning_content": delta.text})
            elif not isinstance(delta, Malformed):
                deltas.append({"tool_calls": [self._call(delta.index, delta.name, delta.arguments)]})
        logprobs = None
        if self._with_logprobs and event.logprobs:
            logprobs = [_logprob_entry(each, self._codec) for each in event.logprobs]
            deltas = deltas or [{}]
        last = len(deltas) - 1
        return [Piece(delta, logprobs if index == last else None) for index, delta in enumerate(deltas)]

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        if index in self._calls:
            return {"index": index, "function": {"arguments": arguments}}
        self._calls.add(index)
        function = {"name": name or "", "arguments": arguments}
        return {
            "index": index,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }


class TextPieces:
    """Pieces of a text completion.

    A token is told of when it is read, also if its text is held back or cut off by a stop
    string. So where it stands is counted in the text as it would be without any.
    """

    def __init__(self, codec: ChatCodec, *, with_logprobs: bool) -> None:
        self._codec = codec
        self._with_logprobs = with_logprobs
        self._uncut = TextPipeline(codec.token_bytes, codec.control_ids, PlainParser(), ())
        self._characters = 0

    def opening(self) -> Sequence[Piece]:
        return ()

    def of(self, event: OutputEvent) -> Sequence[Piece]:
        if isinstance(event, OutputEnd):
            return (Piece({"text": ""}, finish_reason=event.reason),)
        text = _content(event.deltas)
        logprobs = [self._entry(each) for each in event.logprobs] if self._with_logprobs else None
        return (Piece({"text": text}, logprobs or None),) if text or logprobs else ()

    def _entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        entry = {**_logprob_entry(logprob, self._codec), "text_offset": self._characters}
        self._characters += len(_content(self._uncut.push(logprob.token)))
        return entry


class FoldedChoice:
    """The fold of the pieces of one choice."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: FinishReason | None = None

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take the next pieces, in order."""
        for piece in pieces:
            for key, value in piece.delta.items():
                if key == "tool_calls":
                    for call in value:
                        self._add_call(call)
                elif key != "role":
                    self._texts.setdefault(key, []).append(value)
            if piece.logprobs is not None:
                self._logprobs = [*(self._logprobs or ()), *piece.logprobs]
            self._finish_reason = piece.finish_reason or self._finish_reason

    def _add_call(self, call: dict[str, Any]) -> None:
        index = call["index"]
        if index not in self._calls:
            rest = {key: value for key, value in call.items() if key != "index"}
            self._calls[index] = {**rest, "function": dict(call["function"])}
        else:
            self._calls[index]["function"]["arguments"] += call["function"]["arguments"]

    def chat_choice(self, index: int) -> dict[str, Any]:
        """This choice of a whole chat completion. Content is null if there are only tool calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text("content")}
        if "reasoning_content" in self._texts:
            message["reasoning_content"] = self._text("reasoning_content")
        if self._calls:
            message["tool_calls"] = [self._calls[each] for each in sorted(self._calls)]
        return {
            "index": index,
            "message": message,
            "logprobs": _chat_logprobs(self._logprobs),
            "finish_reason": self._finish_reason,
        }

    def text_choice(self, index: int) -> dict[str, Any]:
        """This choice of a whole text completion."""
        return {
            "index": index,
            "text": self._text("text") or "",
            "logprobs": _text_logprobs(self._logprobs),
            "finish_reason": self._finish_reason,
        }

    def _text(self, key: str) -> str | None:
        return "".join(self._texts[key]) if key in self._texts else None


class AnswerWriter:
    """Writes the chunks of a stream and the body of a whole answer, of one request.

    What all chunks of a choice share is spelled out once, not for every token.
    """

    def __init__(
        self,
        kind: Literal["chat", "text"],
        *,
        model: str,
        choices: Sequence[Pieces],
        include_usage: bool,
    ) -> None:
        self._kind = kind
        self._choices = choices
        self._folded = [FoldedChoice() for _ in choices]
        self._include_usage = include_usage
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": "chat.completion" if kind == "chat" else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        chunk_head = dict(self._head)
        if kind == "chat":
            chunk_head["object"] = "chat.completion.chunk"
        self._chunk_head = _json(chunk_head)[:-1]
        self._starts = [
            f'data: {self._chunk_head},"choices":[{{"index":{index},' for index in range(len(choices))
        ]
        self._end = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def opening(self) -> bytes:
        """The chunks before any output."""
        return b"".join(self._chunks(index, pieces.opening()) for index, pieces in enumerate(self._choices))

    def chunks(self, choice: int, event: OutputEvent) -> bytes:
        """The chunks that ``event`` of ``choice`` brings; empty if there is nothing to tell."""
        return self._chunks(choice, self._choices[choice].of(event))

    def closing(self, usage: Usage) -> bytes:
        """The chunks after all outputs."""
        done = "data: [DONE]\n\n"
        if self._include_usage:
            last = f'{self._chunk_head},"choices":[],"usage":{_json(usage_body(usage))}}}'
            return f"data: {last}\n\n{done}".encode()
        return done.encode()

    def take(self, choice: int, event: OutputEvent) -> None:
        """Fold ``event`` into the whole answer."""
        self._folded[choice].add(self._choices[choice].of(event))

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The body of the whole answer."""
        choices = [
            folded.chat_choice(index) if self._kind == "chat" else folded.text_choice(index)
            for index, folded in enumerate(self._folded)
        ]
        return {**self._head, "choices": choices, "usage": usage_body(usage)}

    def _chunks(self, choice: int, pieces: Sequence[Piece]) -> bytes:
        start = self._starts[choice]
        return "".join(f"{start}{self._fields(piece)}{self._end}" for piece in pieces).encode()

    def _fields(self, piece: Piece) -> str:
        chat = self._kind == "chat"
        content = f'"delta":{_json(piece.delta)}' if chat else f'"text":{_json(piece.delta["text"])}'
        logprobs = _json((_chat_logprobs if chat else _text_logprobs)(piece.logprobs))
        finish = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
        return f'{content},"logprobs":{logprobs},"finish_reason":{finish}'


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in the shape of OpenAI's API. ``cached_tokens`` appears only if there are any."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
    if usage.cached_tokens > 0:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return body


def _content(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def _chat_logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries}


def _text_logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The same entries as arrays. There are alternatives for all tokens or for none."""
    if entries is None:
        return None
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries] if entries[0]["top_logprobs"] else None,
        "text_offset": [entry["text_offset"] for entry in entries],
    }


def _by_text(entry: dict[str, Any]) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Of several with one text the chosen counts, then the likeliest."""
    found: dict[str, float] = {}
    for each in entry["top_logprobs"]:
        found.setdefault(each["token"], each["logprob"])
    found[entry["token"]] = entry["logprob"]
    return found


def _logprob_entry(logprob: TokenLogprob, codec: ChatCodec) -> dict[str, Any]:
    return {
        **_token_entry(logprob.token, logprob.logprob, codec),
        "top_logprobs": [_token_entry(token, value, codec) for token, value in logprob.top],
    }


def _token_entry(token: int, logprob: float, codec: ChatCodec) -> dict[str, Any]:
    data = codec.token_bytes(token)
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }
