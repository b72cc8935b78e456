"""The buffer between the engine's thread and a reader."""

from __future__ import annotations

import asyncio
import threading

import pytest

from darkbloom_core.contracts import ContentDelta
from darkbloom_core.engine import OutputDelta, OutputEnd, OutputStream, Timings, Usage
from darkbloom_core.engine._stream import wake_readers

END = OutputEnd("stop", Usage(), Timings())


def delta(text: str) -> OutputDelta:
    return OutputDelta((ContentDelta(text),))


def stream(limit: int = 4, wake=lambda: None) -> OutputStream:
    return OutputStream(wake, limit)


def test_a_thread_reads_everything_in_order_and_stops_after_the_end():
    one = stream(1000)
    writer = threading.Thread(target=lambda: [one.push(delta(str(n))) for n in range(500)] + [one.push(END)])
    writer.start()
    events = list(one)
    writer.join()
    assert [event.deltas[0].text for event in events[:-1]] == [str(n) for n in range(500)]
    assert events[-1] is END


def test_a_coroutine_reads_everything_that_another_thread_pushes():
    one = stream(1000)

    def write():
        for event in [*(delta(str(number)) for number in range(500)), END]:
            one.push(event)
            wake_readers([one])

    async def read():
        return [event async for event in one]

    writer = threading.Timer(0.02, write)
    writer.start()
    events = asyncio.run(asyncio.wait_for(read(), 20))
    writer.join()
    assert len(events) == 501


def test_nothing_can_follow_the_end():
    one = stream()
    one.push(END)
    with pytest.raises(RuntimeError, match="ended already"):
        one.push(delta("late"))


def test_a_full_buffer_says_so_and_wakes_the_engine_once_it_is_half_empty():
    woken = []
    one = stream(4, lambda: woken.append(True))
    for number in range(4):
        assert not one.is_full
        one.push(delta(str(number)))
    assert one.is_full
    assert not one.is_drained
    reader = iter(one)
    next(reader)
    assert not woken
    next(reader)
    assert woken
    assert one.is_drained
    reader.close()


def test_a_reader_whose_event_loop_is_gone_cancels():
    woken = []
    one = stream(4, lambda: woken.append(True))

    async def read_one():
        reader = aiter(one)
        await anext(reader)
        await reader.aclose()

    one.push(delta("a"))
    asyncio.run(read_one())
    one.push(delta("b"))
    wake_readers([one])
    assert one.cancelled
    assert woken


def test_coroutines_of_one_event_loop_are_woken_together():
    streams = [stream() for _ in range(5)]

    async def read_all():
        readers = [asyncio.ensure_future(read(one)) for one in streams]
        await asyncio.sleep(0)
        wakes, loop = [], asyncio.get_running_loop()
        schedule = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: wakes.append(call) or schedule(*call)
        for event in (delta("a"), delta("b"), END):
            for one in streams:
                one.push(event)
            wake_readers(streams)
            await asyncio.sleep(0.01)
        assert len(wakes) == 3
        return await asyncio.gather(*readers)

    async def read(one):
        return [event async for event in one]

    assert asyncio.run(read_all()) == [[delta("a"), delta("b"), END]] * 5
