"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from darkbloom_core.errors import InvalidRequest, RequestCancelled, RequestError
from darkbloom_core.server import ErrorAnswer, Generation, read_json, request_context
from darkbloom_dialects._endpoint import Answer, AnswerEndpoint
from darkbloom_dialects._options import DialectOptions
from darkbloom_dialects._responses_answer import ResponseAnswer
from darkbloom_dialects._responses_bodies import InputItem, ResponsesBody
from darkbloom_dialects._responses_request import AskedResponse, asked_response, output_items
from darkbloom_dialects._responses_store import ResponseStore, StoredResponse

MAX_PAGE = 100
DEFAULT_PAGE = 20

_PARAMS = {"messages": "input", "reasoning_effort": "reasoning.effort", "max_tokens": "max_output_tokens"}
"""Fields that this dialect names otherwise than the core."""


class ResponseNotFound(RequestError):
    """No response of this id is kept."""

    status = 404
    code = "response_not_found"


def responses_routes(options: DialectOptions) -> list[BaseRoute]:
    """``/v1/responses`` and what is below it."""
    responses = Responses(ResponseStore(options))
    one = "/v1/responses/{name}"
    return [
        Route("/v1/responses", responses),
        Route(one, responses.retrieve, methods=["GET"]),
        Route(one, responses.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", responses.cancel, methods=["POST"]),
        Route(f"{one}/input_items", responses.input_items, methods=["GET"]),
    ]


class Responses(AnswerEndpoint[AskedResponse]):
    """``POST /v1/responses``, and what can be done with a response that runs or is kept: by its own API key alone."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[str, tuple[str | None, Generation, ResponseAnswer]] = {}

    def read(self, data: bytes, owner: str | None) -> AskedResponse:
        body = read_json(data, ResponsesBody)
        if body.previous_response_id is None:
            return asked_response(body, (), date.today(), len(data), owner)
        previous = self.store.get(body.previous_response_id, owner)
        if previous is None or previous.response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest(
                "previous_response_id: no such response is kept, or it did not end well",
                param="previous_response_id",
            )
        earlier = (*previous.given, *previous.made)
        return asked_response(body, earlier, date.today(), len(data) + previous.bytes, owner)

    def answer(self, asked: AskedResponse, generation: Generation) -> ResponseAnswer:
        def keep(response: dict[str, Any]) -> None:
            del self._running[response["id"]]
            if asked.body.store is False:
                return
            made = tuple(output_items(response["output"]))
            size = asked.items_bytes + len(json.dumps(response))
            self.store.put(StoredResponse(response, asked.items, made, size, asked.owner))

        return ResponseAnswer(f"resp_{secrets.token_hex(16)}", _head(asked.body, generation), keep)

    def error_body(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        return replace(answer, param=_PARAMS.get(answer.param or "", answer.param)).body()

    @contextmanager
    def following(self, asked: AskedResponse, generation: Generation, answer: Answer) -> Iterator[None]:
        """A response that runs can be asked for and cancelled."""
        assert isinstance(answer, ResponseAnswer)
        self._running[answer.id] = (asked.owner, generation, answer)
        try:
            yield
        finally:
            self._running.pop(answer.id, None)

    async def retrieve(self, request: Request) -> JSONResponse:
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("stream: a response that was made cannot be streamed again", param="stream")
        if (running := self._running_one(request)) is not None:
            return JSONResponse(running[1].body("in_progress"))
        return JSONResponse(self._stored(request).response)

    async def cancel(self, request: Request) -> JSONResponse:
        if (running := self._running_one(request)) is not None:
            generation, answer = running
            generation.cancel(RequestCancelled("the response was cancelled"))
            return JSONResponse(answer.body("cancelled"))
        status = self._stored(request).response["status"]
        raise InvalidRequest(f"the response does not run any more: it is {status}")

    async def delete(self, request: Request) -> JSONResponse:
        name = self._stored(request).response["id"]
        self.store.pop(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> JSONResponse:
        """A page of the items that led to a response, earlier responses' included; the latest first by default."""
        items = list(self._stored(request).given)
        limit, after, latest_first = _page(request)
        if latest_first:
            items.reverse()
        if after is not None:
            places = [index for index, item in enumerate(items) if item.id == after]
            if not places:
                raise InvalidRequest("after: there is no such item", param="after")
            items = items[places[0] + 1 :]
        data = [_item_body(item) for item in items[:limit]]
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
                "has_more": len(items) > limit,
            }
        )

    def _running_one(self, request: Request) -> tuple[Generation, ResponseAnswer] | None:
        found = self._running.get(request.path_params["name"])
        if found is None or found[0] != request_context(request.scope).key_name:
            return None
        return found[1:]

    def _stored(self, request: Request) -> StoredResponse:
        stored = self.store.get(request.path_params["name"], request_context(request.scope).key_name)
        if stored is None:
            raise ResponseNotFound("no response of this id is kept")
        return stored


def _page(request: Request) -> tuple[int, str | None, bool]:
    """How many items, after which, and whether the latest come first."""
    limit, order = (
        request.query_params.get("limit", str(DEFAULT_PAGE)),
        request.query_params.get("order", "desc"),
    )
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest(f"limit: should be a number from 1 to {MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: should be asc or desc", param="order")
    return int(limit), request.query_params.get("after"), order == "desc"


def _item_body(item: InputItem) -> dict[str, Any]:
    return {**item.model_dump(exclude_none=True), "status": "completed"}


def _text_format(body: ResponsesBody) -> dict[str, Any]:
    asked = None if body.text is None else body.text.format
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)


def _head(body: ResponsesBody, generation: Generation) -> dict[str, Any]:
    """What a response repeats of its request."""
    choice = body.tool_choice or "auto"
    return {
        "created_at": int(time.time()),
        "model": generation.slot.name,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "text": {"format": _text_format(body)},
        "max_output_tokens": body.max_output_tokens,
        "temperature": generation.sampling.temperature,
        "top_p": generation.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "store": body.store is not False,
        "background": False,
    }
