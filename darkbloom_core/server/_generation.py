"""One accepted request's outputs: follow them as they come, and account for them once.

No sequence outlives its request: every stream that has not ended is cancelled on the way out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from darkbloom_core.contracts import (
    FinishReason,
    Malformed,
    Prompt,
    RequestFinished,
    ToolCallDelta,
)
from darkbloom_core.engine import (
    OutputDelta,
    OutputEnd,
    OutputEvent,
    SamplingParams,
    Usage,
)
from darkbloom_core.errors import (
    DarkbloomError,
    GenerationFailed,
    RequestCancelled,
)
from darkbloom_core.server._context import RequestContext
from darkbloom_core.server._errors import error_answer
from darkbloom_core.server._requests import AnswerRequest

if TYPE_CHECKING:
    from darkbloom_core.engine import OutputStream
    from darkbloom_core.slots import Slot


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


def _least(values: Iterator[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
