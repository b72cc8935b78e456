"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from darkbloom_core.server import (
    AnswerRequest,
    ClientWatch,
    ErrorAnswer,
    Generation,
    generation_service,
    read_json,
    request_context,
)
from darkbloom_dialects._anthropic_answer import MessageAnswer, error_body
from darkbloom_dialects._anthropic_bodies import CountBody, MessagesBody
from darkbloom_dialects._anthropic_request import AskedMessage, asked_chat, asked_message
from darkbloom_dialects._endpoint import AnswerEndpoint, only_post, read_in_time


def anthropic_routes() -> list[BaseRoute]:
    """``/v1/messages`` and what is below it."""
    return [
        Route("/v1/messages", Messages()),
        Route("/v1/messages/count_tokens", CountTokens()),
        Route("/v1/messages/{rest:path}", Nothing()),
    ]


class AnthropicErrors:
    """Errors of an endpoint in the dialect's shape."""

    def error_body(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        return error_body(answer)


class Messages(AnthropicErrors, AnswerEndpoint[AskedMessage]):
    """``POST /v1/messages``."""

    def read(self, data: bytes, owner: str | None) -> AskedMessage:
        return asked_message(read_json(data, MessagesBody), date.today())

    def answer(self, asked: AskedMessage, generation: Generation) -> MessageAnswer:
        return MessageAnswer(
            model=generation.slot.name,
            prompt_tokens=generation.prompt_tokens,
            shows_thinking=asked.shows_thinking,
        )


class CountTokens(AnthropicErrors):
    """``POST /v1/messages/count_tokens``: how long the prompt would be."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        context.error_body = self.error_body
        only_post(scope)
        data = await Request(scope, receive).body()
        async with ClientWatch(receive) as client:
            request = await read_in_time(_read_count, data)
            service = generation_service(scope["app"])
            tokens = await service.count_prompt_tokens(request, context, client)
        await JSONResponse({"input_tokens": tokens})(scope, receive, send)


def _read_count(data: bytes) -> AnswerRequest:
    body = read_json(data, CountBody)
    return AnswerRequest(model=body.model, source=asked_chat(body, date.today()))


class Nothing(AnthropicErrors):
    """Any other path: its error has the dialect's shape, too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_context(scope).error_body = self.error_body
        raise HTTPException(404)
