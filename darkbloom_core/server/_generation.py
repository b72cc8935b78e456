"""From a request to its outputs: find the slot, encode, submit, follow, and account for it once.

Whatever happens after ``RequestStarted``, exactly one ``RequestFinished`` follows, and no
sequence outlives its request: every stream that has not ended is cancelled on the way out.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from darkbloom_core.contracts import (
    Chat,
    Emitter,
    FinishReason,
    Malformed,
    PreparedPicture,
    Prompt,
    RequestFinished,
    RequestStarted,
    ToolCallDelta,
)
from darkbloom_core.engine import (
    GenerationRequest,
    OutputDelta,
    OutputEnd,
    OutputEvent,
    PlainParser,
    SamplingParams,
    Usage,
)
from darkbloom_core.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    DarkbloomError,
    Draining,
    GenerationFailed,
    InvalidRequest,
    NeverFits,
    RequestCancelled,
)
from darkbloom_core.server._context import ClientWatch, RequestContext
from darkbloom_core.server._errors import error_answer
from darkbloom_core.server._grammars import OutputGrammars
from darkbloom_core.server._media import MediaService
from darkbloom_core.server._requests import AnswerRequest
from darkbloom_core.settings import Settings

if TYPE_CHECKING:
    from darkbloom_core.engine import OutputStream
    from darkbloom_core.grammar import CompiledGrammar
    from darkbloom_core.slots import Slot, SlotManager

LEAST_DEFAULT_TOKENS = 64


class Generation:
    """One accepted request's outputs: iterate it once for (choice index, event), in order for each choice.

    An output that called a tool and came to its own end has the reason ``"tool_calls"``.

    Iterating raises what ended the request early: ``RequestCancelled`` if the client left,
    ``Draining`` if the server is stopping, or the engine's own error. ``OutputEnd`` comes
    only for outputs that ended well.
    """

    def __init__(
        self,
        slot: Slot,
        prompt: Prompt,
        sampling: SamplingParams,
        max_tokens: int,
        streams: Sequence[OutputStream],
    ) -> None:
        self.slot = slot
        self.prompt_tokens = len(prompt.ids)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.error: DarkbloomError | None = None
        self._streams = streams
        self._ends: dict[int, OutputEnd] = {}
        self._malformed: set[int] = set()
        self._called: set[int] = set()
        self._cancelled_by: DarkbloomError | None = None
        self._events = self._follow()

    @property
    def usage(self) -> Usage:
        """Tokens of all outputs that have ended; the prompt counts once, as the output that computed most of it did."""
        usages = [end.usage for end in self._ends.values()]
        return Usage(
            prompt_tokens=max((usage.prompt_tokens for usage in usages), default=0),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=min((usage.cached_tokens for usage in usages), default=0),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        )

    def cancel(self, because: DarkbloomError) -> None:
        """Stop all outputs; whoever iterates gets ``because``, unless they had ended before."""
        if self._cancelled_by is None:
            self._cancelled_by = because
        self._abandon()

    def _abandon(self) -> None:
        """Stop every output that has not ended."""
        for index, stream in enumerate(self._streams):
            if index not in self._ends:
                stream.cancel()

    def __aiter__(self) -> AsyncIterator[tuple[int, OutputEvent]]:
        return self._events

    async def close(self) -> None:
        """Stop every output that has not ended, and the tasks that follow them."""
        self._abandon()
        await self._events.aclose()

    async def _follow(self) -> AsyncGenerator[tuple[int, OutputEvent], None]:
        async with aclosing(_merged(self._streams)) as events:
            async for index, event in events:
                if isinstance(event, OutputEnd):
                    if event.reason == "stop" and index in self._called:
                        event = replace(event, reason="tool_calls")
                    self._ends[index] = event
                    self.error = self._fault(event)
                    if self.error is not None:
                        raise self.error
                else:
                    self._note(index, event)
                yield index, event

    def _note(self, index: int, event: OutputDelta) -> None:
        for delta in event.deltas:
            if isinstance(delta, ToolCallDelta):
                self._called.add(index)
            elif isinstance(delta, Malformed):
                self._malformed.add(index)

    def _fault(self, end: OutputEnd) -> DarkbloomError | None:
        if end.reason == "cancelled":
            return self._cancelled_by or RequestCancelled("the request was cancelled")
        if end.reason == "error":
            return end.error or GenerationFailed("generation failed")
        return None

    def finished(
        self, request: AnswerRequest, context: RequestContext, error: BaseException | None
    ) -> RequestFinished:
        """The account of this request. ``error`` is what ended it early, if anything did."""
        answer = None if error is None else error_answer(error)
        timings = [end.timings for end in self._ends.values()]
        reasons: list[FinishReason] = [end.reason for end in self._ends.values()]
        usage = self.usage
        return RequestFinished(
            model=self.slot.name,
            operation=request.operation,
            request_id=context.request_id,
            trace_parent=context.trace_parent,
            started_unix_nanoseconds=context.started_unix_nanoseconds,
            duration_seconds=time.monotonic() - context.started_seconds,
            status=200 if answer is None else answer.status,
            error_code=None if answer is None else answer.code,
            finish_reasons=tuple(reasons),
            streamed=request.streamed,
            choices=request.choices,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            malformed_outputs=len(self._malformed),
            max_tokens=self.max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            seed=request.sampling.seed,
            time_to_first_token_seconds=_least(each.time_to_first_token_seconds for each in timings),
            queue_seconds=_least(each.queue_seconds for each in timings),
            prefill_seconds=_least(each.prefill_seconds for each in timings),
            decode_seconds=_most(each.decode_seconds for each in timings),
        )


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


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, OutputEvent], None]:
    """The events of all streams as they come, until each has ended."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    iterators = [aiter(stream) for stream in streams]
    pending = {asyncio.ensure_future(anext(iterator)): index for index, iterator in enumerate(iterators)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                event = task.result()
                if isinstance(event, OutputDelta):
                    pending[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, event
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


def _not_empty(prompt: Prompt, request: AnswerRequest) -> Prompt:
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty", param=_source_field(request))
    return prompt


def _source_field(request: AnswerRequest) -> str:
    return "messages" if isinstance(request.source, Chat) else "prompt"


def _draining() -> Draining:
    return Draining("the server is shutting down", retry_after_seconds=5)


def _least(values: Iterator[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
