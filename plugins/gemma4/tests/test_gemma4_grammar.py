"""What outputs must be: calls that are required, arguments in the format's own syntax, answers in a format."""

import json

import pytest
from darkbloom_gemma4._parser import Gemma4Parser
from fits import Fits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import AnswerFormat, Chat, JsonText, Message, TextPart, Tool, ToolCallDelta
from darkbloom_core.errors import InvalidRequest

Q = '<|"|>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="get_weather", parameters=CITY, strict=True)
LOOSE = Tool(name="now", parameters={"type": "object"})
JSON = AnswerFormat(text=JsonText(CITY, "schema"))

THOUGHT = "<|channel>thought\nHm: {\n<channel|>"
CALL = f"<|tool_call>call:get_weather{{city:{Q}Paris{Q}}}<tool_call|>"
WRONG = f"<|tool_call>call:get_weather{{town:{Q}Paris{Q}}}<tool_call|>"
NOW = "<|tool_call>call:now{}<tool_call|>"
END = "<turn|>"


@pytest.fixture(scope="module")
def codec(family, demo_folder, load):
    return family.codec(demo_folder, load(demo_folder).description)


@pytest.fixture(scope="module")
def fits(codec):
    return Fits(codec, {name: token for token, name in codec._names.items()})


def chat(**fields):
    return Chat(messages=(Message(role="user", content=(TextPart("Hi!"),)),), **fields)


TOOLS = (WEATHER, LOOSE)
CASES = {
    "required": (
        chat(tools=TOOLS, tool_choice="required"),
        [CALL + END, CALL + NOW + "<|tool_response>", THOUGHT + CALL + END],
        [f"It is 4.{END}", WRONG + END, THOUGHT + END],
    ),
    "named": (chat(tools=TOOLS, tool_choice="required", named_tool="now"), [NOW + END], [CALL + END]),
    "strict": (
        chat(tools=TOOLS),
        [CALL + END, f"One moment.{CALL}{END}", f"It is 4.{END}", THOUGHT + f"4{END}"],
        [WRONG + END],
    ),
    "one call": (
        chat(tools=(LOOSE,), parallel_tool_calls=False),
        [NOW + END, f"4{END}"],
        [NOW + NOW + END],
    ),
    "answer": (
        chat(answer=JSON),
        ['{"city": "Oslo"}' + END, THOUGHT + '{"city": "Oslo"}' + END],
        [f"Oslo{END}", CALL + END],
    ),
    "answer or call": (chat(answer=JSON, tools=(LOOSE,)), ['{"city": "Oslo"}' + END, NOW + END], [f"4{END}"]),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_that_answer_fit_and_others_do_not(fits, name):
    asked, good, bad = CASES[name]
    assert [fits(asked, output) for output in good] == [True] * len(good)
    assert [fits(asked, output) for output in bad] == [False] * len(bad)


@pytest.mark.parametrize("asked", [chat(), chat(tools=(LOOSE,)), chat(parallel_tool_calls=False)])
def test_nothing_is_constrained_that_need_not_be(codec, asked):
    assert codec.grammar(asked) is None


def test_a_call_cannot_be_required_without_a_tool(codec):
    with pytest.raises(InvalidRequest) as caught:
        codec.grammar(chat(tool_choice="required"))
    assert caught.value.param == "tool_choice"


def test_arguments_may_be_nested_deeply_with_much_that_is_optional(fits):
    """What is nested too deeply for the format's own syntax is JSON."""
    schema = {"type": "string"}
    for _ in range(60):
        schema = {
            "type": "object",
            "properties": {**{f"o{n}": {"type": "integer"} for n in range(7)}, "n": schema},
        }
    tool = Tool(name="f", parameters=schema, strict=True)
    arguments = "{n:" * 16 + '{"n": ' * 44 + '"x"' + "}" * 60
    output = f"<|tool_call>call:f{arguments}<tool_call|>"
    assert fits(chat(tools=(tool,), tool_choice="required"), output + END)


def test_definitions_that_are_long_make_the_arguments_json(fits):
    """They would go with every part of the arguments that is JSON."""
    place = {"type": "string", "enum": ["Oslo"], "description": "x" * 3000}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/place"}}, "$defs": {"place": place}}
    tool = Tool(name="f", parameters=schema, strict=True)
    asked = chat(tools=(tool,), tool_choice="required")
    assert fits(asked, f'<|tool_call>call:f{{"a": "Oslo"}}<tool_call|>{END}')


texts = st.text("ab }", max_size=4)
SCALARS = [
    ({"type": "string"}, texts),
    ({"type": "string", "minLength": 1, "maxLength": 2}, st.text("ab", min_size=1, max_size=2)),
    ({"type": "string", "pattern": "^x+$"}, st.text("x", min_size=1, max_size=3)),
    ({"type": "integer"}, st.integers(-99, 99)),
    ({"type": ["boolean", "null"]}, st.sampled_from([True, False, None])),
    ({"enum": ["a", "b b"]}, st.sampled_from(["a", "b b"])),
    ({"enum": [1, None, "x"]}, st.sampled_from([1, None, "x"])),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, texts | st.integers(0, 9)),
    ({"$ref": "#/$defs/flag"}, st.booleans()),
]


def objects(members):
    """A schema of an object of ``members`` (name, needed, (schema, values)), and values of it."""
    schema = {
        "type": "object",
        "properties": {name: each[0] for name, _, each in members},
        "required": [name for name, needed, _ in members if needed],
    }
    needed = {name: each[1] for name, needed, each in members if needed}
    others = {name: each[1] for name, needed, each in members if not needed}
    order = list(schema["properties"])
    values = st.fixed_dictionaries(needed, optional=others)
    return schema, values.map(lambda value: {name: value[name] for name in order if name in value})


def lists(item):
    return {"type": "array", "items": item[0], "maxItems": 3}, st.lists(item[1], max_size=3)


names = st.sampled_from(["a", "b_2", "two words", "c"])
schemas = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        inner.map(lists),
        st.lists(
            st.tuples(names, st.booleans(), inner), min_size=1, max_size=3, unique_by=lambda each: each[0]
        ).map(objects),
    ),
    max_leaves=5,
)


def written(value, schema):
    """``value`` as the format writes it, or as JSON where the schema leaves it no other way."""
    if "pattern" in schema or "$ref" in schema or schema.get("type") == ["boolean", "null"]:
        return json.dumps(value)
    if "enum" in schema and not all(isinstance(each, str) for each in schema["enum"]):
        return f"{Q}{value}{Q}" if isinstance(value, str) else json.dumps(value)
    if isinstance(value, dict):
        members = [f"{key(name)}:{written(each, schema['properties'][name])}" for name, each in value.items()]
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(each, schema["items"]) for each in value) + "]"
    return f"{Q}{value}{Q}" if isinstance(value, str) else json.dumps(value)


def key(name):
    return f"{Q}{name}{Q}" if " " in name else name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arguments_that_fit_a_strict_schema_are_taken_and_read_back(codec, fits, data):
    schema, values = data.draw(
        st.lists(
            st.tuples(names, st.booleans(), schemas), min_size=1, max_size=3, unique_by=lambda each: each[0]
        ).map(objects)
    )
    value = data.draw(values)
    tool = Tool(name="f", parameters={**schema, "$defs": {"flag": {"type": "boolean"}}}, strict=True)
    asked = chat(tools=(tool,), tool_choice="required")
    output = f"<|tool_call>call:f{written(value, schema)}<tool_call|>"
    assert fits(asked, output + END), output
    parser, deltas = Gemma4Parser(codec._names, frozenset({"f"})), []
    for token in fits.tokens(output):
        text = codec.token_bytes(token).decode(errors="replace")
        deltas += parser.control(token) if token in codec._names else parser.text(text)
    (call,) = deltas
    assert isinstance(call, ToolCallDelta)
    assert json.loads(call.arguments) == value
