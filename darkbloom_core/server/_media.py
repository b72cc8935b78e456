"""From the pictures and videos of a request to prepared ones, while its client is still there.

Always true: whatever happens, work that nobody waits for any more is told so, and what is
reserved for the pictures is released when the request is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from darkbloom_core.contracts import Chat, MediaPart, ModelDescription, Part, PreparedPicture, VisionSeam
from darkbloom_core.errors import DarkbloomError, RequestCancelled
from darkbloom_core.media import MediaJob, MediaWorkers, PreparedMedia
from darkbloom_core.memory import Ledger
from darkbloom_core.server._context import ClientWatch
from darkbloom_core.server._requests import AskedMedia, asked_in
from darkbloom_core.settings import MediaSettings

LOOK_SECONDS = 0.25
"""How often whoever waits looks whether the work is overdue or the server stops."""


class MediaService:
    """Lives on the server's event loop; the work is done in threads."""

    def __init__(self, limits: MediaSettings, ledger: Ledger) -> None:
        self._workers = MediaWorkers(limits, ledger)
        self._refusal: DarkbloomError | None = None

    def refuse(self, because: DarkbloomError) -> None:
        """Begin nothing more; whoever waits gets ``because``."""
        self._refusal = because

    def close(self) -> None:
        """Begin nothing more."""
        self._workers.close()

    @asynccontextmanager
    async def prepared(
        self, chat: Chat, seam: VisionSeam | None, description: ModelDescription, client: ClientWatch
    ) -> AsyncIterator[tuple[Chat, tuple[PreparedPicture, ...]]]:
        """``chat`` with its media looked at, and all their pictures in order; they are held while the block runs.

        Raises ``InvalidRequest`` that names the part at fault, also if the model does not see.
        """
        asked = list(asked_in(chat))
        if not asked:
            yield chat, ()
            return
        for one in asked:
            if seam is None or one.kind not in description.modalities:
                raise one.source.fault(f"this model does not accept {one.kind}s")
        assert seam is not None
        self._check()
        job = self._workers.begin([one.source for one in asked], seam, description.context_tokens)
        try:
            media = await self._result(job, client)
        except BaseException:
            job.abandon()
            raise
        try:
            yield _with_parts(chat, media.parts), media.pictures
        finally:
            media.release()

    async def _result(self, job: MediaJob, client: ClientWatch) -> PreparedMedia:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(news.set)

        job.future.add_done_callback(tell)
        client.when_gone(news.set)
        while not job.future.done():
            if client.gone:
                raise RequestCancelled("the client has gone")
            self._check()
            if job.is_overdue:
                raise job.too_slow()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), LOOK_SECONDS)
        return job.future.result()

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal


def _with_parts(chat: Chat, parts: tuple[MediaPart, ...]) -> Chat:
    looked_at = iter(parts)

    def filled(part: Part) -> Part:
        return next(looked_at) if isinstance(part, AskedMedia) else part

    messages = (
        replace(message, content=tuple(filled(part) for part in message.content)) for message in chat.messages
    )
    return replace(chat, messages=tuple(messages))
