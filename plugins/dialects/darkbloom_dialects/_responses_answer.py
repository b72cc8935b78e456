"""From the engine's events to those of the Responses API: one item after another, and the response at the end.

Always true: the last event of a stream carries the whole response, and that is what a
client gets that did not ask for a stream.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from darkbloom_core.contracts import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import OutputEnd, OutputEvent, Usage
from darkbloom_core.errors import DarkbloomError, RequestCancelled
from darkbloom_core.server import error_answer
from darkbloom_dialects._endpoint import Event

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}

Kind = Literal["message", "reasoning", "function_call"]


class _Item:
    """The item that is being told."""

    def __init__(self, kind: Kind, index: int, *, name: str = "", call: int = -1) -> None:
        self.kind = kind
        self.index = index
        self.call = call
        self.pieces: list[str] = []
        self.id = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
        self._call = {"call_id": f"call_{secrets.token_hex(12)}", "name": name}

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        """The only part of a message or of thoughts, as it is now."""
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": _PART_TYPES[self.kind], "text": self.text, **more}

    def body(self, status: str) -> dict[str, Any]:
        """The item as it is now; before it has any text it has no part."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, **self._call, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part()]
        more: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**head, **more, "content": content}


class ResponseAnswer:
    """One response. ``head`` is what it repeats of the request; ``keep`` gets the response once it is over."""

    def __init__(self, id_: str, head: Mapping[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
        self.id = id_
        self._head = {"id": id_, "object": "response", **head}
        self._keep = keep
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._last_call = -1
        self._sequence = 0

    def body(
        self,
        status: str,
        *,
        usage: Usage | None = None,
        incomplete: str | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response as it is now, with the items that are complete."""
        return {
            **self._head,
            "status": status,
            "output": list(self._output),
            "usage": None if usage is None else _usage(usage),
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "error": error,
        }

    def opening(self) -> Sequence[Event]:
        return [
            self._event(f"response.{name}", response=self.body("in_progress"))
            for name in ("created", "in_progress")
        ]

    def of(self, event: OutputEvent) -> Sequence[Event]:
        if isinstance(event, OutputEnd):
            return list(self._end(event))
        return [told for delta in event.deltas for told in self._delta(delta)]

    def failed(self, error: DarkbloomError) -> Sequence[Event]:
        told = list(self._close("incomplete"))
        if isinstance(error, RequestCancelled):
            return [*told, self._over("response.incomplete", self.body("cancelled"))]
        answer = error_answer(error)
        fault = {"code": answer.code, "message": answer.message}
        return [*told, self._over("response.failed", self.body("failed", error=fault))]

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        *_, last = events
        response: dict[str, Any] = last["response"]
        return response

    def _delta(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ContentDelta):
            yield from self._text("message", delta.text)
        elif isinstance(delta, ReasoningDelta):
            yield from self._text("reasoning", delta.text)
        elif isinstance(delta, ToolCallDelta):
            yield from self._call(delta)

    def _text(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        if not text:
            return
        if self._item is None or self._item.kind != kind:
            yield from self._open(kind)
        yield self._piece(f"response.{_PART_TYPES[kind]}.delta", text)

    def _call(self, delta: ToolCallDelta) -> Iterator[Event]:
        if delta.index > self._last_call:
            self._last_call = delta.index
            yield from self._open("function_call", name=delta.name or "", call=delta.index)
        if (
            self._item is None or self._item.call != delta.index
        ):  # its call is told already: what comes late is kept
            yield from self._text("message", delta.arguments)
        elif delta.arguments:
            yield self._piece("response.function_call_arguments.delta", delta.arguments)

    def _open(self, kind: Kind, **call: Any) -> Iterator[Event]:
        yield from self._close("completed")
        self._item = item = _Item(kind, len(self._output), **call)
        yield self._event(
            "response.output_item.added", output_index=item.index, item=item.body("in_progress")
        )
        if kind != "function_call":
            yield self._of_item("response.content_part.added", part=item.part())

    def _piece(self, name: str, text: str) -> Event:
        assert self._item is not None
        self._item.pieces.append(text)
        return self._of_item(name, delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        item = self._item
        if item is None:
            return
        if item.kind == "function_call":
            yield self._of_item("response.function_call_arguments.done", arguments=item.text)
        else:
            yield self._of_item(f"response.{_PART_TYPES[item.kind]}.done", text=item.text)
            yield self._of_item("response.content_part.done", part=item.part())
        self._item = None
        self._output.append(item.body(status))
        yield self._event("response.output_item.done", output_index=item.index, item=self._output[-1])

    def _end(self, end: OutputEnd) -> Iterator[Event]:
        if self._item is None and not self._output:
            yield from self._open("message")
        cut = end.reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        if cut:
            response = self.body("incomplete", usage=end.usage, incomplete="max_output_tokens")
            yield self._over("response.incomplete", response)
        else:
            yield self._over("response.completed", self.body("completed", usage=end.usage))

    def _over(self, name: str, response: dict[str, Any]) -> Event:
        self._keep(response)
        return self._event(name, response=response)

    def _of_item(self, name: str, **fields: Any) -> Event:
        """An event about the open item, and about its only part unless it is a call."""
        assert self._item is not None
        place: dict[str, Any] = {"item_id": self._item.id, "output_index": self._item.index}
        if self._item.kind != "function_call":
            place["content_index"] = 0
        if ".output_text." in name:
            fields["logprobs"] = []
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": name, "sequence_number": self._sequence - 1, **fields}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
