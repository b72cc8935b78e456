"""Generated requests over HTTP: a stream, its bytes cut anywhere, folds in the official clients to the whole answer."""

from itertools import cycle

import anthropic
import httpx
import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODEL = "toy/plain"


class Cuts:
    """Where the bytes of answers are cut: in pieces of ``sizes``, over and over."""

    def __init__(self):
        self.sizes = [1]

    def pieces(self, data):
        start = 0
        for size in cycle(self.sizes):
            yield data[start : start + size]
            start += size
            if start >= len(data):
                return

    def client(self, library):
        """An HTTP client of ``library`` that gets every answer in such pieces."""

        pieces = self.pieces

        class Transport(library.HTTPTransport):
            def handle_request(self, request):
                answer = super().handle_request(request)
                headers = {"content-type": answer.headers["content-type"]}
                content = pieces(answer.read())
                return library.Response(answer.status_code, headers=headers, content=content)

        return library.Client(transport=Transport(), timeout=30)


@pytest.fixture(scope="module")
def cuts():
    return Cuts()


@pytest.fixture(scope="module")
def openai_client(dialect_server, cuts):
    with openai.OpenAI(
        base_url=f"{dialect_server.url}/v1", api_key="none", max_retries=0, http_client=cuts.client(httpx)
    ) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(dialect_server, cuts):
    """This client brings an HTTP library of its own."""
    with anthropic.Anthropic(
        base_url=dialect_server.url, api_key="none", max_retries=0, http_client=cuts.client(httpx2)
    ) as client:
        yield client


prompts = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", min_size=1, max_size=8)
lengths = st.integers(1, 16)
stops = st.lists(st.text("ABCDEF01+-*", min_size=1, max_size=2), max_size=3)
sizes = st.lists(st.integers(1, 300), min_size=1, max_size=6)

chats = st.fixed_dictionaries(
    {
        "messages": prompts.map(lambda text: [{"role": "user", "content": text}]),
        "max_tokens": lengths,
        "temperature": st.sampled_from([0, 1, 2]),
        "seed": st.integers(0, 9),
        "n": st.integers(1, 2),
    },
    optional={"stop": stops.filter(bool), "logprobs": st.just(True), "frequency_penalty": st.just(1)},
)
messages = st.fixed_dictionaries(
    {
        "messages": prompts.map(lambda text: [{"role": "user", "content": text}]),
        "max_tokens": lengths,
        "extra_body": st.just({"temperature": 0}),
    },
    optional={
        "stop_sequences": stops,
        "thinking": st.just({"type": "enabled", "budget_tokens": 1024}),
        "system": prompts,
    },
)
responses = st.fixed_dictionaries(
    {"input": prompts, "max_output_tokens": lengths, "temperature": st.just(0)},
    optional={"instructions": prompts, "store": st.booleans()},
)

some = settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bare(value):
    """``value`` without ids and times of its own, without nulls, and without what a client adds to what it was sent."""
    if isinstance(value, list):
        return [bare(each) for each in value]
    if not isinstance(value, dict):
        return value
    left_out = {"id", "call_id", "created", "created_at", "index", "parsed", "parsed_arguments"}
    return {key: bare(each) for key, each in value.items() if each is not None and key not in left_out}


@some
@given(fields=chats, sizes=sizes)
def test_a_streamed_completion_is_the_whole_one(openai_client, cuts, fields, sizes) -> None:
    cuts.sizes = sizes
    whole = openai_client.chat.completions.create(model=MODEL, **fields)
    with openai_client.chat.completions.stream(
        model=MODEL, **fields, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        folded = stream.current_completion_snapshot
    assert bare({**folded.to_dict(), "object": whole.object}) == bare(whole.to_dict())
    assert len(whole.choices) == fields["n"]


@some
@given(fields=messages, sizes=sizes)
def test_a_streamed_message_is_the_whole_one(anthropic_client, cuts, fields, sizes) -> None:
    cuts.sizes = sizes
    whole = anthropic_client.messages.create(model=MODEL, **fields)
    with anthropic_client.messages.stream(model=MODEL, **fields) as stream:
        folded = stream.get_final_message()
    assert bare(folded.to_dict()) == bare(whole.to_dict())


@some
@given(fields=responses, sizes=sizes)
def test_a_streamed_response_is_the_whole_one_and_its_deltas_are_its_text(
    openai_client, cuts, fields, sizes
) -> None:
    cuts.sizes = sizes
    whole = openai_client.responses.create(model=MODEL, **fields)
    told: dict[str, str] = {}
    with openai_client.responses.stream(model=MODEL, **fields) as stream:
        for event in stream:
            if event.type.endswith(".delta"):
                told[event.item_id] = told.get(event.item_id, "") + event.delta
            last = event
    folded = last.response  # the client's own getter knows no response that was cut
    assert bare(folded.to_dict()) == bare(whole.to_dict())
    items = {item.id: item for item in folded.output}
    for name, text in told.items():
        item = items[name]
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
