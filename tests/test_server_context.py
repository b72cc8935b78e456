"""The watch over a client: it sees the client leave, and only that."""

import asyncio

import pytest

from darkbloom_core.server import ClientWatch


async def watch(messages, use):
    """Run ``use(watch, queue)`` while a watch reads from a queue that begins with ``messages``."""
    queue = asyncio.Queue()
    for message in messages:
        queue.put_nowait({"type": message})
    async with ClientWatch(queue.get) as client:
        await asyncio.sleep(0)
        await use(client, queue)


def run(messages, use):
    asyncio.run(asyncio.wait_for(watch(messages, use), 5))


def test_it_calls_back_once_the_client_has_gone() -> None:
    calls = []

    async def use(client, queue):
        client.when_gone(lambda: calls.append("first"))
        assert (client.gone, calls) == (False, [])
        queue.put_nowait({"type": "http.disconnect"})
        await asyncio.sleep(0.01)
        assert (client.gone, calls) == (True, ["first"])
        client.when_gone(lambda: calls.append("late"))
        assert calls == ["first", "late"]

    run(["http.request"], use)


def test_it_ends_with_its_block() -> None:
    async def use(client, queue):
        pass

    run([], use)


def test_it_ends_when_its_block_fails() -> None:
    async def use(client, queue):
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run([], use)
