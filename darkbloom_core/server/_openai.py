"""The routes of OpenAI's API: chat completions, text completions and models; embeddings are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from darkbloom_core.errors import DarkbloomError, NotOffered
from darkbloom_core.server._answer import AnswerWriter, ChatPieces, Pieces, TextPieces
from darkbloom_core.server._bodies import ChatCompletionBody, CompletionBody, read_json
from darkbloom_core.server._context import ClientWatch, request_context
from darkbloom_core.server._convert import chat_request, completion_request
from darkbloom_core.server._edge import send_json
from darkbloom_core.server._errors import error_answer
from darkbloom_core.server._generation import Generation
from darkbloom_core.server._requests import AnswerRequest
from darkbloom_core.server._service import GenerationService

if TYPE_CHECKING:
    from darkbloom_core.slots import KnownModel, Slot

LARGE_BODY_BYTES = 64 * 1024
"""A body from this size on is read in a thread, so that it holds nobody's stream up."""

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Body = TypeVar("Body", bound=BaseModel)


def openai_routes(service: GenerationService) -> list[BaseRoute]:
    """Routes below ``/v1``. A model's name may hold slashes."""
    chat = _Completions(
        service, "chat", lambda data: chat_request(read_json(data, ChatCompletionBody), date.today())
    )
    text = _Completions(service, "text", lambda data: completion_request(read_json(data, CompletionBody)))
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", text, methods=["POST"]),
        Route("/v1/embeddings", _embeddings, methods=["POST"]),
        Route("/v1/models", _list_models(service), methods=["GET"]),
        Route("/v1/models/{name:path}", _one_model(service), methods=["GET"]),
    ]


class _Completions:
    """``POST`` of one kind of completion, streamed or whole, as an ASGI application."""

    def __init__(
        self,
        service: GenerationService,
        kind: Literal["chat", "text"],
        read: Callable[[bytes], AnswerRequest],
    ) -> None:
        self._service = service
        self._kind = kind
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = await Request(scope, receive).body()
        async with ClientWatch(receive) as client:
            if len(data) < LARGE_BODY_BYTES:
                request = self._read(data)
            else:
                request = await asyncio.to_thread(self._read, data)
            del data  # pictures make it large, and an answer takes long
            async with self._service.generate(request, request_context(scope), client) as generation:
                writer = self._writer(request, generation.slot)
                if request.streamed:
                    await send_stream(send, generation, writer)
                else:
                    async for choice, event in generation:
                        writer.take(choice, event)
                    await send_json(send, writer.whole(generation.usage))

    def _writer(self, request: AnswerRequest, slot: Slot) -> AnswerWriter:
        choices: list[Pieces] = []
        for _ in range(request.choices):
            pieces = ChatPieces if self._kind == "chat" else TextPieces
            choices.append(pieces(slot.codec, with_logprobs=request.sampling.logprobs is not None))
        return AnswerWriter(self._kind, model=slot.name, choices=choices, include_usage=request.include_usage)


async def send_stream(send: Send, generation: Generation, writer: AnswerWriter) -> None:
    """Send server-sent events as they come. An error in the middle is the last event."""
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
    await _send_part(send, writer.opening())
    try:
        async for choice, event in generation:
            await _send_part(send, writer.chunks(choice, event))
    except DarkbloomError as error:
        await _send_part(send, f"data: {json.dumps(error_answer(error).body())}\n\n".encode())
    else:
        await _send_part(send, writer.closing(generation.usage))
    await send({"type": "http.response.body", "body": b""})


async def _send_part(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _embeddings(_: Request) -> NoReturn:
    raise NotOffered("this server makes no embeddings: its models answer /v1/chat/completions")


def _list_models(service: GenerationService) -> Callable[[Request], Any]:
    async def list_models(_: Request) -> JSONResponse:
        data = [model_body(model) for model in service.slots.known()]
        return JSONResponse({"object": "list", "data": data})

    return list_models


def _one_model(service: GenerationService) -> Callable[[Request], Any]:
    async def one_model(request: Request) -> JSONResponse:
        return JSONResponse(model_body(service.slots.known_model(request.path_params["name"])))

    return one_model


def model_body(model: KnownModel) -> dict[str, Any]:
    """A model in the shape of OpenAI's API, how long its context is, and what it reads."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_seconds,
        "owned_by": model.description.family,
        "context_length": model.description.context_tokens,
        "modalities": sorted(model.description.modalities),
    }
