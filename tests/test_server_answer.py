"""From events to answers: a stream, put together by another's client, is the whole answer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from toy_family import ToyCodec
from toy_server import ToyChatCodec

from darkbloom_core.contracts import ContentDelta, Malformed, ReasoningDelta, ToolCallDelta
from darkbloom_core.engine import (
    OutputDelta,
    OutputEnd,
    PlainParser,
    TextPipeline,
    Timings,
    TokenLogprob,
    Usage,
)
from darkbloom_core.server._answer import AnswerWriter, ChatPieces, TextPieces, usage_body

USAGE = Usage(prompt_tokens=7, completion_tokens=5, reasoning_tokens=2)
CODEC = ToyChatCodec()

letters = st.sampled_from('ab{}"\\\n\t\u2028\u0085é中😀')
texts = st.text(letters, min_size=1, max_size=8)
logprobs = st.lists(
    st.builds(
        TokenLogprob,
        st.integers(0, 63),
        st.floats(-20, 0) | st.just(float("-inf")),
        st.lists(st.tuples(st.integers(0, 63), st.floats(-20, 0)), max_size=2).map(tuple),
    ),
    max_size=2,
).map(tuple)


@st.composite
def outputs(draw):
    """One output: deltas in any order and any cut, calls counted up from 0, each named in its first piece."""
    events, calls = [], 0
    for _ in range(draw(st.integers(0, 8))):
        deltas = []
        for kind in draw(
            st.lists(st.sampled_from(["content", "reasoning", "new", "more", "bad"]), max_size=3)
        ):
            if kind == "content":
                deltas.append(ContentDelta(draw(texts)))
            elif kind == "reasoning":
                deltas.append(ReasoningDelta(draw(texts)))
            elif kind == "new":
                deltas.append(ToolCallDelta(calls, draw(texts), draw(st.text(letters, max_size=4))))
                calls += 1
            elif kind == "more" and calls:
                deltas.append(ToolCallDelta(calls - 1, None, draw(texts)))
            else:
                deltas.append(Malformed("broken"))
        events.append(OutputDelta(tuple(deltas), draw(logprobs)))
    reason = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    return [*events, OutputEnd(reason, USAGE, Timings())]


def chat_writer(count=1, *, with_logprobs=True, include_usage=True) -> AnswerWriter:
    choices = [ChatPieces(CODEC, with_logprobs=with_logprobs) for _ in range(count)]
    return AnswerWriter("chat", model="toy/m", choices=choices, include_usage=include_usage)


def text_writer(codec=CODEC, *, with_logprobs=False) -> AnswerWriter:
    choices = [TextPieces(codec, with_logprobs=with_logprobs)]
    return AnswerWriter("text", model="m", choices=choices, include_usage=False)


def streamed(writer, events) -> list[dict]:
    data = writer.opening() + b"".join(writer.chunks(*event) for event in events) + writer.closing(USAGE)
    blocks = data.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def whole(writer, events) -> dict:
    for event in events:
        writer.take(*event)
    return json.loads(json.dumps(writer.whole(USAGE), allow_nan=False))


def without_ids(choices: list[dict]) -> list[dict]:
    for choice in choices:
        for position, call in enumerate(choice["message"].get("tool_calls") or []):
            assert call.pop("id").startswith("call_")
            assert call.pop("index", position) == position  # the client's fold keeps it
    return choices


@settings(deadline=None)
@given(st.lists(outputs(), min_size=1, max_size=3))
def test_a_stream_folds_to_the_whole_answer(choices) -> None:
    events = [(index, event) for index, output in enumerate(choices) for event in output]
    state = ChatCompletionStreamState()
    for chunk in streamed(chat_writer(len(choices)), events):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    folded = state.current_completion_snapshot.to_dict()
    answer = whole(chat_writer(len(choices)), events)
    for choice in folded["choices"]:
        choice["message"].pop("parsed", None)
        for call in choice["message"].get("tool_calls") or []:
            call["function"].pop("parsed_arguments", None)
    assert without_ids(drop_nulls(folded["choices"])) == without_ids(drop_nulls(answer["choices"]))
    assert folded["usage"] == answer["usage"]


def drop_nulls(value):
    """A client's fold knows no difference between null and absent."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(outputs())
def test_a_stream_has_the_shape_that_clients_expect(output) -> None:
    chunks = streamed(chat_writer(), [(0, event) for event in output])
    *parts, usage = chunks
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert all(None not in part["choices"][0]["delta"].values() for part in parts)
    finishes = [part["choices"][0]["finish_reason"] for part in parts]
    assert set(finishes[:-1]) <= {None}
    assert finishes[-1] == output[-1].reason
    assert (usage["choices"], usage["usage"]) == ([], usage_body(USAGE))
    assert len({(part["id"], part["created"], part["model"], part["object"]) for part in chunks}) == 1


@settings(deadline=None)
@given(outputs())
def test_calls_come_one_by_one_each_with_an_id_of_its_own(output) -> None:
    chunks = streamed(chat_writer(), [(0, event) for event in output])
    calls = [
        call for chunk in chunks for each in chunk["choices"] for call in each["delta"].get("tool_calls", [])
    ]
    opened = [call for call in calls if "id" in call]
    assert [call["index"] for call in opened] == list(range(len(opened)))
    assert len({call["id"] for call in opened}) == len(opened)
    assert all(len(c["delta"].get("tool_calls", [])) <= 1 for chunk in chunks for c in chunk["choices"])


@settings(deadline=None)
@given(st.lists(texts, max_size=6))
def test_a_text_completion_streams_what_it_answers_whole(pieces) -> None:
    events = [(0, OutputDelta((ContentDelta(text),))) for text in pieces]
    events.append((0, OutputEnd("length", USAGE, Timings())))
    chunks, answer = streamed(text_writer(), events), whole(text_writer(), events)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(pieces)
    assert answer["choices"][0] == {
        "index": 0,
        "text": "".join(pieces),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert answer["object"] == chunks[0]["object"] == "text_completion"


def test_without_include_usage_no_chunk_speaks_of_usage() -> None:
    events = [(0, OutputDelta((ContentDelta("a"),))), (0, OutputEnd("stop", USAGE, Timings()))]
    assert all("usage" not in chunk for chunk in streamed(chat_writer(include_usage=False), events))


def test_content_is_null_only_beside_tool_calls() -> None:
    end = (0, OutputEnd("stop", USAGE, Timings()))
    call = (0, OutputDelta((ToolCallDelta(0, "f", "{}"),)))
    said = (0, OutputDelta((ContentDelta("a"),)))
    assert whole(chat_writer(), [end])["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert whole(chat_writer(), [call, end])["choices"][0]["message"]["content"] is None
    assert whole(chat_writer(), [said, call, end])["choices"][0]["message"]["content"] == "a"


def test_logprobs_are_left_out_unless_asked_for() -> None:
    logprob = TokenLogprob(33, -0.5, ((33, -0.5), (61, float("-inf"))))
    events = [(0, OutputDelta((ContentDelta("A"),), (logprob,))), (0, OutputEnd("stop", USAGE, Timings()))]
    for writer in (chat_writer, text_writer):
        assert whole(writer(with_logprobs=False), events)["choices"][0]["logprobs"] is None
    assert whole(chat_writer(), events)["choices"][0]["logprobs"]["content"] == [
        {
            "token": "A",
            "logprob": -0.5,
            "bytes": [65],
            "top_logprobs": [
                {"token": "A", "logprob": -0.5, "bytes": [65]},
                {"token": "", "logprob": -9999.0, "bytes": []},
            ],
        }
    ]


A, HALF, OTHER_HALF, THREE, START, CONTROL = range(6)
CUTS = ToyCodec(
    {A: b"a", HALF: b"\xe4\xb8", OTHER_HALF: b"\xadb", THREE: "cé😀".encode(), START: b"\xf0\x9f"},
    control_ids=frozenset({CONTROL}),
)


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "offsets"),
    [
        ((A, HALF, OTHER_HALF, THREE, CONTROL, A), (), "a中bcé😀a", [0, 1, 1, 3, 6, 6]),
        ((A, HALF, OTHER_HALF, THREE, A), ("bcé",), "a中", [0, 1, 1, 3]),
        ((A, A, HALF, OTHER_HALF), ("aaaa", "b"), "aa中", [0, 1, 2, 2]),
        ((A, A, A), ("aaaa",), "aaa", [0, 1, 2]),
        ((A, START), (), "a", [0, 1]),
        ((START, CONTROL, A, A), (), "aa", [0, 0, 0, 1]),
    ],
    ids=["halves", "cut off", "held back, then cut off", "held back to the end", "unfinished", "dropped"],
)
def test_the_tokens_of_a_text_completion_stand_where_their_text_is(tokens, stops, text, offsets) -> None:
    pipeline, events = TextPipeline(CUTS.token_bytes, CUTS.control_ids, PlainParser(), stops), []
    for place, token in enumerate(tokens):
        if not pipeline.stopped:
            logprob = TokenLogprob(token, -float(place), ((THREE, -0.5),))
            events.append((0, OutputDelta(pipeline.push(token), (logprob,))))
    events += [(0, OutputDelta(pipeline.finish())), (0, OutputEnd("stop", USAGE, Timings()))]
    answer = whole(text_writer(CUTS, with_logprobs=True), events)["choices"][0]
    found = answer["logprobs"]
    assert (answer["text"], found["text_offset"]) == (text, offsets)
    assert (
        found["tokens"]
        == [CUTS.token_bytes(token).decode(errors="replace") for token in tokens][: len(offsets)]
    )
    assert found["token_logprobs"] == [-float(place) for place in range(len(offsets))]
    chunks = [chunk["choices"][0] for chunk in streamed(text_writer(CUTS, with_logprobs=True), events)]
    assert "".join(chunk["text"] for chunk in chunks) == text
    assert folded_arrays(chunk["logprobs"] for chunk in chunks) == found


def folded_arrays(parts) -> dict[str, list]:
    folded: dict[str, list] = {}
    for part in filter(None, parts):
        for name, array in part.items():
            folded.setdefault(name, []).extend(array)
    return folded


def test_of_alternatives_with_one_text_the_chosen_one_counts_and_then_the_likeliest() -> None:
    top = ((THREE, -0.5), (HALF, -1.0), (START, -2.0), (A, float("-inf")))
    for chosen, of_halves in ((THREE, -1.0), (HALF, -1.0), (START, -2.0)):
        event = OutputDelta((), (TokenLogprob(chosen, dict(top)[chosen], top[:3]),))
        writer = text_writer(CUTS, with_logprobs=True)
        (alternatives,) = whole(writer, [(0, event)])["choices"][0]["logprobs"]["top_logprobs"]
        assert alternatives == {"cé😀": -0.5, "�": of_halves}
    event = OutputDelta((), (TokenLogprob(A, float("-inf"), top[:1]),))
    writer = text_writer(CUTS, with_logprobs=True)
    (alternatives,) = whole(writer, [(0, event)])["choices"][0]["logprobs"]["top_logprobs"]
    assert alternatives == {"cé😀": -0.5, "a": -9999.0}


def test_a_stream_is_plain_ascii() -> None:
    """Some clients split lines wherever Unicode sees a line end, as after U+2028."""
    writer = chat_writer()
    data = writer.chunks(0, OutputDelta((ContentDelta("a\u2028b\u0085c\n😀"),)))
    assert data.isascii()
    assert len(data.decode().splitlines()) == 2
    assert json.loads(data.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "a\u2028b\u0085c\n😀"


@pytest.mark.parametrize("cached", [0, 256])
def test_cached_tokens_are_told_only_if_there_are_any(cached) -> None:
    body = usage_body(Usage(prompt_tokens=300, completion_tokens=5, cached_tokens=cached, reasoning_tokens=1))
    assert body["total_tokens"] == 305
    assert body["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert body.get("prompt_tokens_details") == ({"cached_tokens": 256} if cached else None)
