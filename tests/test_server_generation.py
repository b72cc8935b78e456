"""A generation used directly, as a plugin's route would: whatever happens inside, nothing is left running."""

import asyncio
import threading
from functools import partial

import pytest
from starlette.datastructures import Headers
from toy_server import ToyServer

from darkbloom_core.contracts import Chat, Message, RequestFinished, RequestStarted, TextPart
from darkbloom_core.engine import OutputEnd
from darkbloom_core.errors import (
    ContextLengthExceeded,
    Draining,
    GenerationFailed,
    ModelNotFound,
    RequestCancelled,
)
from darkbloom_core.server import (
    AnswerRequest,
    ClientWatch,
    RequestContext,
    SamplingOverrides,
    generation_service,
)

CHAT = Chat(messages=(Message(role="user", content=(TextPart("HELLO"),)),))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {
        "slow": {"seconds": 0.01},
        "broken": {"seconds": 0.01, "breaks_on": 33},
        "calls": {"stop_ids": [1]},
    }
    server = ToyServer(tmp_path_factory.mktemp("generation"), models)
    yield server
    server.slots.close()


@pytest.fixture(autouse=True)
def nothing_yet(server):
    server.sink.take()


def run(server, request, use, leaves_first=False):
    """Generate ``request`` and let ``use`` have it, with a client that stays (or has left already).

    Afterwards, while the loop still runs, nothing is left in the engine.
    """
    service = generation_service(server.app)

    async def generate():
        messages = asyncio.Queue()
        if leaves_first:
            messages.put_nowait({"type": "http.disconnect"})
        context = RequestContext(Headers())
        async with (
            ClientWatch(messages.get) as client,
            service.generate(request, context, client) as generation,
        ):
            return await use(generation)

    async def main():
        try:
            return await asyncio.wait_for(generate(), 20)
        finally:
            await asyncio.to_thread(server.wait_until_idle, 2)

    return asyncio.run(main())


def ask(model="slow", **fields) -> AnswerRequest:
    return AnswerRequest(**{"model": model, "source": CHAT, "max_tokens": 3000, **fields})


def test_the_length_of_the_prompt_is_known_before_any_output(server) -> None:
    async def both(generation):
        before = generation.prompt_tokens
        async for _ in generation:
            pass
        return before, generation.usage.prompt_tokens

    before, after = run(server, ask(max_tokens=1), both)
    assert before == after > 0


def test_a_prompt_can_be_counted_without_an_answer(server) -> None:
    service = generation_service(server.app)

    async def count(request):
        async with ClientWatch(asyncio.Queue().get) as client:
            return await service.count_prompt_tokens(request, RequestContext(Headers()), client)

    async def length(generation):
        return generation.prompt_tokens

    assert asyncio.run(count(ask())) == run(server, ask(max_tokens=1), length)
    with pytest.raises(ModelNotFound):
        asyncio.run(count(ask("other")))


async def everything(generation):
    return [event async for event in generation]


@pytest.mark.parametrize("choices", [1, 3])
def test_a_fault_while_an_answer_is_written_stops_the_rows(server, choices) -> None:
    async def fails(generation):
        async for _ in generation:
            raise ValueError("cannot write this")

    with pytest.raises(ValueError, match="cannot write"):
        run(server, ask(choices=choices), fails)
    _, ended = server.sink.take(RequestStarted, RequestFinished)
    assert (ended.status, ended.error_code) == (500, "internal_error")


@pytest.mark.parametrize("choices", [1, 3])
def test_whoever_stops_iterating_stops_the_rows(server, choices) -> None:
    async def takes_one(generation):
        return await anext(aiter(generation))

    assert run(server, ask(choices=choices), takes_one)


def test_one_failed_choice_ends_all(server) -> None:
    """The seed is such that not all choices draw the broken token at the same step."""
    request = ask("broken", choices=4, sampling=SamplingOverrides(seed=1, logit_bias={33: 2.0}))
    with pytest.raises(GenerationFailed):
        run(server, request, everything)
    (ended,) = server.sink.take(RequestFinished)
    assert (ended.status, ended.error_code) == (500, "generation_failed")


def test_a_client_that_left_before_is_not_generated_for(server) -> None:
    with pytest.raises(RequestCancelled):
        run(server, ask(), everything, leaves_first=True)
    assert server.sink.take(RequestStarted, RequestFinished) == []


def test_a_client_that_leaves_costs_the_others_no_more_than_the_step_that_runs(server, monkeypatch) -> None:
    """And the one that was launched behind it."""
    service, status = generation_service(server.app), server.engine("slow").status
    monkeypatch.setattr(server.slots.get("slow").codec, "seconds", 0.1)  # for each token

    async def main():
        messages = asyncio.Queue()
        async with (
            ClientWatch(messages.get) as client,
            service.generate(ask("slow"), RequestContext(Headers()), client) as generation,
        ):
            events = aiter(generation)
            await anext(events)
            steps = status().steps
            messages.put_nowait({"type": "http.disconnect"})
            with pytest.raises(RequestCancelled):
                async for _ in events:
                    pass
        while status().running:
            await asyncio.sleep(0.001)
        return status().steps - steps

    assert asyncio.run(main()) <= 2
    server.wait_until_idle(2)


def test_a_client_that_leaves_while_its_prompt_is_written_is_not_generated_for(server, monkeypatch) -> None:
    """What encodes cannot be stopped, but nothing comes of it: no row, no pin, 499."""
    slot, left = server.slots.get("slow"), threading.Event()
    encode = slot.codec.encode_chat

    def encode_slowly(chat):
        leave()
        assert left.wait(10)
        return encode(chat)

    monkeypatch.setattr(slot.codec, "encode_chat", encode_slowly)

    async def main():
        messages, loop = asyncio.Queue(), asyncio.get_running_loop()
        nonlocal leave
        leave = partial(loop.call_soon_threadsafe, messages.put_nowait, {"type": "http.disconnect"})
        async with ClientWatch(messages.get) as client:
            client.when_gone(left.set)
            async with generation_service(server.app).generate(ask(), RequestContext(Headers()), client):
                pytest.fail("nobody waits for this")

    leave = None
    with pytest.raises(RequestCancelled):
        asyncio.run(main())
    assert slot.pins == 0
    assert server.sink.take(RequestStarted, RequestFinished) == []


def test_choices_that_are_not_all_admitted_are_all_taken_back(server) -> None:
    with pytest.raises(ContextLengthExceeded):
        run(server, ask(max_tokens=5000, choices=2), everything)
    with pytest.raises(Exception, match="running and waiting"):
        run(server, ask(max_tokens=2000, choices=80), everything)
    assert server.sink.take(RequestStarted, RequestFinished) == []


def test_an_output_that_called_a_tool_says_so_at_its_end(server) -> None:
    """The penalty makes the call's token give way to the stop token after some steps."""
    calls = SamplingOverrides(logit_bias={62: 100.0, 1: 80.0}, frequency_penalty=2.0, temperature=0)
    events = run(server, ask("calls", sampling=calls, max_tokens=100), everything)
    assert isinstance(events[-1][1], OutputEnd)
    assert events[-1][1].reason == "tool_calls"
    cut = run(server, ask("calls", sampling=calls, max_tokens=3), everything)
    assert cut[-1][1].reason == "length"
    text = run(server, ask("calls", sampling=SamplingOverrides(logit_bias={1: 100.0})), everything)
    assert text[-1][1].reason == "stop"


def test_a_draining_service_takes_nothing(tmp_path) -> None:
    server = ToyServer(tmp_path, {"toy": {}})
    generation_service(server.app).drain()
    with pytest.raises(Draining):
        run(server, ask("toy"), everything)
    server.slots.close()
