"""From a request to its outputs: find the slot, encode, submit, and account for it once.

Whatever happens after ``RequestStarted``, exactly one ``RequestFinished`` follows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from darkbloom_core.contracts import (
    Chat,
    Emitter,
    PreparedPicture,
    Prompt,
    RequestStarted,
)
from darkbloom_core.engine import (
    GenerationRequest,
    PlainParser,
    SamplingParams,
)
from darkbloom_core.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    Draining,
    InvalidRequest,
    NeverFits,
    RequestCancelled,
)
from darkbloom_core.server._context import ClientWatch, RequestContext
from darkbloom_core.server._generation import Generation
from darkbloom_core.server._grammars import OutputGrammars
from darkbloom_core.server._media import MediaService
from darkbloom_core.server._requests import AnswerRequest
from darkbloom_core.settings import Settings

if TYPE_CHECKING:
    from darkbloom_core.engine import OutputStream
    from darkbloom_core.grammar import CompiledGrammar
    from darkbloom_core.slots import Slot, SlotManager

LEAST_DEFAULT_TOKENS = 64


class GenerationService:
    """What every dialect's routes generate through. It lives on the server's event loop."""

    def __init__(self, slots: SlotManager, settings: Settings, emitter: Emitter) -> None:
        self.slots = slots
        self._settings = settings
        self._emitter = emitter
        self._media = MediaService(settings.media, slots.memory.ledger)
        self._grammars = OutputGrammars()
        self._live: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loads: set[asyncio.Future[Slot]] = set()
        self.draining = False

    @property
    def running(self) -> int:
        """How many accepted requests are not accounted for yet."""
        return len(self._live)

    def drain(self) -> None:
        """Take nothing new from now on; who waits for a model to load need not wait any more."""
        self.draining = True
        self._media.refuse(_draining())
        self.slots.drain()
        for load in tuple(self._loads):
            load.cancel()

    def close(self) -> None:
        """After everything has ended: the threads that read pictures end, too."""
        self._media.close()

    def cancel_all(self) -> None:
        """End all that is running; its clients are told that the server is stopping."""
        for generation in tuple(self._live):
            generation.cancel(_draining())

    async def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing runs; False if that took too long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def generate(
        self, request: AnswerRequest, context: RequestContext, client: ClientWatch
    ) -> AsyncIterator[Generation]:
        """Admit ``request`` and hand over its outputs; raises the refusal before that.

        The request is over when the context is left.
        """
        scope, context.media_kind = context.scope, request.media_kind
        async with (
            self._pinned_slot(request.model, client) as slot,
            self._encoded(request, slot, client) as (prompt, pictures),
        ):
            grammar = await self._grammars.compiled(request.source, slot)
            if client.gone:
                raise RequestCancelled("the client has gone")
            if self.draining:
                raise _draining()
            generation = self._submit(request, slot, prompt, pictures, grammar, scope)
            async with self._accounted(generation, request, context, client):
                yield generation

    async def count_prompt_tokens(
        self, request: AnswerRequest, context: RequestContext, client: ClientWatch
    ) -> int:
        """How long the prompt of ``request`` is for the model that it names; raises the refusal of either."""
        context.media_kind = request.media_kind
        async with (
            self._pinned_slot(request.model, client) as slot,
            self._encoded(request, slot, client) as (prompt, _),
        ):
            return len(prompt.ids)

    @asynccontextmanager
    async def _accounted(
        self, generation: Generation, request: AnswerRequest, context: RequestContext, client: ClientWatch
    ) -> AsyncIterator[None]:
        context.accepted = True
        self._emitter.emit(RequestStarted(model=generation.slot.name, operation=request.operation))
        self._live.add(generation)
        self._idle.clear()
        client.when_gone(lambda: generation.cancel(RequestCancelled("the client has gone")))
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            await generation.close()
            error = generation.error or error
            self._emitter.emit(generation.finished(request, context, error))
            self._live.discard(generation)
            if not self._live:
                self._idle.set()

    @asynccontextmanager
    async def _pinned_slot(self, name: str, client: ClientWatch) -> AsyncIterator[Slot]:
        """The slot that serves ``name``, loaded first if it must be, and not evicted while the block runs."""
        if self.draining:
            raise _draining()
        while (slot := self.slots.try_acquire(name)) is None:
            await self._loaded(name, client)
        try:
            yield slot
        finally:
            self.slots.release(slot)

    async def _loaded(self, name: str, client: ClientWatch) -> None:
        """Wait for a load; who need not wait any more stops, and the load goes on for the others."""
        load = asyncio.wrap_future(self.slots.load_known(name))
        self._loads.add(load)

        def stop_waiting() -> None:
            load.cancel()

        client.when_gone(stop_waiting)
        try:
            await load
        except asyncio.CancelledError:
            if client.gone:
                raise RequestCancelled("the client has gone") from None
            if self.draining:
                raise _draining() from None
            raise
        finally:
            self._loads.discard(load)

    @asynccontextmanager
    async def _encoded(
        self, request: AnswerRequest, slot: Slot, client: ClientWatch
    ) -> AsyncIterator[tuple[Prompt, tuple[PreparedPicture, ...]]]:
        """The prompt and its pictures, which are held while the block runs."""
        source = request.source
        if isinstance(source, str):
            prompt = Prompt(await asyncio.to_thread(slot.codec.encode_text, source))
            yield _not_empty(prompt, request), ()
            return
        vision, description = slot.engine.vision, slot.description
        async with self._media.prepared(source, vision, description, client) as (chat, pictures):
            prompt = await asyncio.to_thread(slot.codec.encode_chat, chat)
            yield _not_empty(prompt, request), pictures

    def _submit(
        self,
        request: AnswerRequest,
        slot: Slot,
        prompt: Prompt,
        pictures: tuple[PreparedPicture, ...],
        grammar: CompiledGrammar | None,
        scope: str | None,
    ) -> Generation:
        """Submit one sequence for each choice, or none."""
        sampling = request.sampling.over(slot.defaults)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        limits = self._token_limits(request, slot, prompt)
        for position, max_tokens in enumerate(limits):
            try:
                streams = _submit_choices(
                    request, slot, prompt, pictures, grammar, sampling, max_tokens, scope
                )
            except (NeverFits, CapacityExhausted):
                if position == len(limits) - 1:
                    raise
            else:
                return Generation(slot, prompt, sampling, max_tokens, streams)
        raise AssertionError("there is always a limit to try")

    def _token_limits(self, request: AnswerRequest, slot: Slot, prompt: Prompt) -> list[int]:
        """What to try as ``max_tokens``: what the client asked for, or else the default.

        A client that asked for nothing should not be refused because the default is more
        than the memory allows: the default is halved as far as ``LEAST_DEFAULT_TOKENS``.
        """
        if request.max_tokens is not None:
            return [request.max_tokens]
        context_tokens = slot.description.context_tokens
        left = context_tokens - len(prompt.ids)
        if left < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt.ids)} tokens and leaves no room for an answer "
                f"in the model's context of {context_tokens} tokens",
                param=_source_field(request),
            )
        limits = [min(self._settings.engine.default_max_tokens, left)]
        while limits[-1] // 2 >= LEAST_DEFAULT_TOKENS:
            limits.append(limits[-1] // 2)
        return limits


def _submit_choices(
    request: AnswerRequest,
    slot: Slot,
    prompt: Prompt,
    pictures: tuple[PreparedPicture, ...],
    grammar: CompiledGrammar | None,
    sampling: SamplingParams,
    max_tokens: int,
    scope: str | None,
) -> list[OutputStream]:
    name = secrets.token_hex(12)
    chat = request.source if isinstance(request.source, Chat) else None
    streams: list[OutputStream] = []
    try:
        for choice in range(request.choices):
            streams.append(
                slot.engine.submit(
                    GenerationRequest(
                        id=f"{name}-{choice}",
                        prompt=prompt,
                        pictures=pictures,
                        parser=PlainParser() if chat is None else slot.codec.parser(chat),
                        max_tokens=max_tokens,
                        sampling=sampling,
                        stop=request.stop,
                        choice=choice,
                        constraint=None if grammar is None else grammar.constraint(),
                        scope=scope,
                        cache_key=request.cache_key,
                    )
                )
            )
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


def _not_empty(prompt: Prompt, request: AnswerRequest) -> Prompt:
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty", param=_source_field(request))
    return prompt


def _source_field(request: AnswerRequest) -> str:
    return "messages" if isinstance(request.source, Chat) else "prompt"


def _draining() -> Draining:
    return Draining("the server is shutting down", retry_after_seconds=5)
