"""Grammars to allowed tokens: what is taken, where it ends, and what is said of those that cannot be compiled."""

import pytest
from toy_family import ToyCodec

from darkbloom_core.contracts import (
    AnyText,
    ControlToken,
    Exactly,
    InOrder,
    JsonText,
    LarkText,
    OneOf,
    RegexText,
    Repeated,
)
from darkbloom_core.errors import GenerationFailed, InvalidRequest
from darkbloom_core.grammar import GrammarCompiler, _bounds, check_bounds
from darkbloom_core.grammar._faults import find_fault

END, OPEN, CLOSE, UNKNOWN = 256, 257, 258, 259
ENDS = ControlToken(END)


class ByteCodec(ToyCodec):
    """Token ``n`` below 256 is the byte ``n``; two tokens more stand for several bytes; one id stands for nothing."""

    vocab_size = 262
    control_ids = frozenset({END, OPEN, CLOSE})

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else {260: b'{"', 261: "é".encode()}.get(token, b"")

    def encode_text(self, text):
        return tuple(text.encode())


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(ByteCodec())


def allowed(constraint):
    mask = constraint.allowed()
    return {token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1}


def taken(compiler, grammar, *pieces):
    """How many of the tokens are taken, and whether the output is complete after them."""
    constraint, tokens = compiler.compile(grammar).constraint(), []
    for piece in pieces:
        tokens += list(piece.encode()) if isinstance(piece, str) else [piece]
    for count, token in enumerate(tokens):
        if token not in allowed(constraint):
            return count, constraint.complete
        constraint.accept(token)
    return len(tokens), constraint.complete


PERSON = JsonText(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "nonsense"},
    },
    "schema",
)
GOOD = [
    (InOrder((Exactly('a"\\é\n/<'), ENDS)), ['a"\\é\n/<', END]),
    (InOrder((AnyText(), ENDS)), ["any 日 text\n", END]),
    (InOrder((AnyText(), ENDS)), [END]),
    (InOrder((PERSON, ENDS)), ['{"name": "Ann",\n "age":31}', END]),
    (InOrder((PERSON, ENDS)), [260, 'name":"é","age":0 }', END]),
    (InOrder((JsonText({"type": "object"}, ""), ENDS)), ['{"a": [1, null, {"b": true}]}', END]),
    (InOrder((RegexText(r"a/b\d+", ""), ENDS)), ["a/b12", END]),
    (InOrder((RegexText(r"a\/\\/b", ""), ENDS)), ["a/\\/b", END]),
    (InOrder((RegexText("a\nb*", ""), ENDS)), ["a\nbb", END]),
    (InOrder((LarkText('start: x+\nx: "ab" | Y\nY: /c+/', ""), ENDS)), ["abccab", END]),
    (OneOf((InOrder((Exactly("ab"), ENDS)), InOrder((JsonText({"type": "integer"}, ""), ENDS)))), ["-7", END]),
    (InOrder((Repeated(InOrder((ControlToken(OPEN), AnyText(), ControlToken(CLOSE)))), Exactly("x"), ENDS)),
     [OPEN, "hm", CLOSE, OPEN, CLOSE, "x", END]),
    (InOrder((Repeated(ControlToken(OPEN), 1, 2), ENDS)), [OPEN, OPEN, END]),
    (InOrder((Exactly("n:"), JsonText({"type": "number"}, ""), Exactly("}"), ENDS)), ["n:12.5}", END]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "output"), GOOD, ids=range(len(GOOD)))
def test_what_fits_is_taken_to_its_end_and_nothing_after_it(compiler, grammar, output):
    count = sum(len(piece.encode()) if isinstance(piece, str) else 1 for piece in output)
    assert taken(compiler, grammar, *output) == (count, True)


BAD = [
    (InOrder((AnyText(), ENDS)), ["a", OPEN], 1),
    (InOrder((AnyText(), ENDS)), [0xC3, END], 1),
    (InOrder((PERSON, ENDS)), [' {"'], 0),
    (InOrder((PERSON, ENDS)), ['{"name": 1'], 9),
    (InOrder((PERSON, ENDS)), ['{"age"'], 2),
    (InOrder((PERSON, ENDS)), ['{"name": "Ann", "age": -1'], 23),
    (InOrder((PERSON, ENDS)), ['{"name": "Ann"', END], 14),
    (InOrder((PERSON, ENDS)), ["{\n" + " " * 100], 66),
    (InOrder((PERSON, ENDS)), ["{  "], 2),
    (InOrder((PERSON, ENDS)), ["{\n\n"], 2),
    (InOrder((RegexText("ab", ""), ENDS)), ["ab" * 2], 2),
    (InOrder((Repeated(ControlToken(OPEN), 1, 2), ENDS)), [OPEN] * 3, 2),
    (InOrder((AnyText(), ENDS)), [UNKNOWN], 0),
]


@pytest.mark.parametrize(("grammar", "output", "count"), BAD, ids=range(len(BAD)))
def test_what_does_not_fit_is_not_taken(compiler, grammar, output, count):
    assert taken(compiler, grammar, *output) == (count, False)


def test_outputs_of_one_grammar_know_nothing_of_each_other(compiler):
    compiled = compiler.compile(InOrder((Exactly("ab"), ENDS)))
    one, other = compiled.constraint(), compiled.constraint()
    one.accept(ord("a"))
    assert (allowed(one), allowed(other)) == ({ord("b")}, {ord("a")})
    with pytest.raises(GenerationFailed):
        other.accept(ord("x"))
    assert allowed(one) == {ord("b")}


def test_a_grammar_that_leads_where_nothing_fits_is_the_clients_fault(compiler):
    """It is not seen when it is compiled: what can be written begins well."""
    constraint = compiler.compile(InOrder((LarkText('start: "a" b\nb: b "c"', "o"), ENDS))).constraint()
    constraint.accept(ord("a"))
    with pytest.raises(InvalidRequest, match=r"^o: an answer came to where nothing fits it$") as caught:
        constraint.allowed()
    assert caught.value.param == "o"


def test_tokens_that_write_something_else_are_never_chosen_for_a_text():
    """A codec may write what is near where it has no token for a text."""

    class UpperCodec(ByteCodec):
        def token_bytes(self, token):
            return b"" if ord("a") <= token <= ord("z") else super().token_bytes(token)

        def encode_text(self, text):
            return tuple(text.upper().encode())

    compiler = GrammarCompiler(UpperCodec())
    with pytest.raises(InvalidRequest, match="nothing can be written that fits it"):
        compiler.compile(InOrder((LarkText('start: "A" "x"', "o"), ENDS)))
    assert taken(compiler, InOrder((LarkText('start: "A" ("x" | "Y")', "o"), ENDS)), "AY", END) == (3, True)


def chain(length):
    rules = "\n".join(f"r{index}: r{index + 1}" for index in range(length))
    return f'start: r0\n{rules}\nr{length}: "a"'


NESTED = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"not": {}}]}}}


def meeting(*schemas):
    """Schemas that must hold for the same member of an object."""
    return {"allOf": [{"type": "object", "properties": {"a": schema}} for schema in schemas]}


FAULTS = [
    (JsonText({"type": "objekt"}, "f"), "f", "Invalid type"),
    (JsonText(NESTED, "f"), "f.properties.a.anyOf[1]", "Unimplemented keys"),
    (JsonText({"type": "array", "items": {"type": "string", "pattern": "(?=x)"}}, "f"), "f.items", "look-ahead"),
    (JsonText({"$ref": "#/$defs/q", "$defs": {"q": {"type": "string", "format": "zip"}}}, "f"), "f.$defs.q",
     "Unknown format"),
    (JsonText({"type": "string", "minLength": 5, "maxLength": 2}, "f"), "f", "Unsatisfiable"),
    (JsonText({"$ref": "#"}, "f"), "f", "nothing can be written"),
    (JsonText({"type": "integer", "multipleOf": 1000003}, "f"), "f", "multipleOf is too large"),
    (JsonText({"enum": ["x" * 300_000]}, "f"), "f", "more than"),
    (JsonText({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, "f"), "f", "oneOf constraints are not supported$"),
    (JsonText({"allOf": [{"pattern": f"^(.*[a-f].{{{n}}})$"} for n in range(20)]}, "f"), "f", "must hold at once"),
    (JsonText({"$ref": "#/$defs/a", "format": "uri", "$defs": {"a": {"pattern": "x"}}}, "f"), "f",
     "must hold at once"),
    (JsonText(meeting({"pattern": "x"}, {"anyOf": [{"type": "null"}, {"pattern": "y"}]}), "f"), "f",
     "must hold at once"),
    (JsonText({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "pattern": "x"}}, "pattern": "y"}, "f"), "f", "only a [$]ref"),
    (JsonText({"$ref": "#/$defs/%61", "$defs": {"a": {"pattern": "x"}}, "pattern": "y"}, "f"), "f", "only a [$]ref"),
    (JsonText({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "urn:a", "$ref": "#/b", "b": {}}}}, "f"), "f", "have an [$]id"),
    (JsonText({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}, "f"), "f", "must hold at once"),
    (JsonText({"type": "object", "properties": {f"k{n}": {} for n in range(1001)}}, "f"), "f",
     "properties has more than"),
    (JsonText({"anyOf": [{"anyOf": [{}] * 999}] * 6}, "f"), "f", "members in all"),
    (JsonText({"type": "object", "patternProperties": {"^a{1,500}x": {}, "^b{1,500}y": {}}}, "f"), "f",
     "several patternProperties"),
    (LarkText("start: T\nT: /.*a.{20}/ & /.*b.{20}/", "f"), "f", "not supported"),
    (LarkText("start: T\nT: ~/.*a.{20}/", "f"), "f", "not supported"),
    (LarkText("start: foo", "f"), "f", "line 1, column 8: unknown name"),
    (LarkText('start: "a"\n  x y: (', "f"), "f", "line 2"),
    (LarkText('start: start "a"', "f"), "f", "nothing can be written"),
    (LarkText("start: %json {}", "f"), "f", "%json is not supported"),
    (LarkText("start: " + '"a" ' * 20_000, "f"), "f", "longer than"),
    (RegexText("a(", "f"), "f", "unclosed group"),
    (RegexText("a" * 70_000, "f"), "f", "longer than"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "param", "reason"), FAULTS, ids=range(len(FAULTS)))
def test_what_cannot_be_compiled_is_refused_with_its_place(compiler, text, param, reason):
    sound = JsonText({"type": "integer"}, "sound")
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(InOrder((sound, Exactly(" "), text, ENDS)))
    assert caught.value.param == param
    assert len(caught.value.message) < 400


def test_choices_of_choices_are_followed_only_so_far(compiler, monkeypatch):
    """There are four billion combinations."""
    monkeypatch.setattr(_bounds, "WORK_LIMIT", 3000)
    schema = {"allOf": [{"anyOf": [{"minLength": n} for n in range(4)]} for _ in range(16)]}
    with pytest.raises(InvalidRequest, match="f: the schema is too complex"):
        compiler.compile(InOrder((JsonText(schema, "f"), ENDS)))


def test_a_place_that_is_not_found_in_time_is_the_whole_field():
    """Looking for it takes a compilation for each part of a schema."""
    in_time = iter([True, False])
    given = find_fault((JsonText(NESTED, "f"),), "no", lambda text: "no", lambda: next(in_time))
    assert (given.param, given.message) == ("f", "f: no")


def test_a_fault_of_none_alone_belongs_to_the_field_that_all_are_in():
    texts = [JsonText({}, f"tools[{index}].function.parameters") for index in range(3)]
    assert find_fault(texts, "no", lambda text: "", lambda: True).param == "tools"


def enum_of(length):
    """A schema whose JSON is so many characters long."""
    return {"enum": ["x" * (length - len('{"enum": [""]}'))]}


AT_LIMITS = {
    "a schema's characters": (
        lambda over: [JsonText(enum_of(262_144 + over), "f")],
        "more than 262144 characters",
    ),
    "all characters": (
        lambda over: [JsonText(enum_of(length), "f") for length in (200_000, 200_000, 124_288 + over)],
        "more than 524288 characters in all",
    ),
    "members of an object": (
        lambda over: [JsonText({"properties": {f"k{n}": {} for n in range(1000 + over)}}, "f")],
        "properties has more than 1000",
    ),
    "options of a choice": (
        lambda over: [JsonText({"anyOf": [{}] * (1000 + over)}, "f")],
        "anyOf has more than 1000",
    ),
    "members in all": (
        lambda over: [JsonText({"anyOf": [{}] * size}, "f") for size in (*[1000] * 4, 999 + over, 1)],
        "more than 5000 members in all",
    ),
    "multiples": (lambda over: [JsonText({"multipleOf": 20_000 + over}, "f")], "multipleOf is too large"),
    "names": (
        lambda over: [JsonText({"patternProperties": {"a" * (64 + over): {}, "b": {}}}, "f")],
        "several patternProperties",
    ),
    "a grammar's characters": (lambda over: [LarkText("x" * (65_536 + over), "f")], "longer than 65536"),
    "an expression's characters": (lambda over: [RegexText("x" * (65_536 + over), "f")], "longer than 65536"),
}


@pytest.mark.parametrize("bound", AT_LIMITS)
def test_at_each_bound_a_request_passes_and_one_over_it_is_refused(bound):
    texts, reason = AT_LIMITS[bound]
    check_bounds(texts(0))
    with pytest.raises(InvalidRequest, match=reason):
        check_bounds(texts(1))


def test_what_a_request_sends_is_bounded_in_all():
    several = [
        JsonText({"type": "object", "properties": {f"k{n}": {} for n in range(900)}}, f"t{n}")
        for n in range(6)
    ]
    check_bounds(several[:5])
    with pytest.raises(InvalidRequest, match="t5: the schemas have more than 5000 members in all"):
        check_bounds(several)
    with pytest.raises(InvalidRequest, match="t2: the schemas have more than 524288 characters in all"):
        check_bounds([JsonText({"enum": ["x" * 200_000]}, f"t{n}") for n in range(3)])


def test_what_stands_in_a_grammar_many_times_is_gone_through_once(compiler):
    grammar = Exactly("a")
    for _ in range(100):  # there are 2 to the power of 100 ways through it
        grammar = OneOf((InOrder((grammar, Exactly("b"))), grammar))
    assert taken(compiler, InOrder((grammar, ENDS)), "abb", END) == (4, True)


MEET_NOWHERE = [
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}, "b": {"type": "string", "pattern": "y"}}},
    {"$ref": "#/$defs/a", "description": "d", "$defs": {"a": {"type": "string", "pattern": "x", "maxLength": 5}}},
    {"type": "array", "prefixItems": [{"type": "string", "pattern": "x"}], "items": {"type": "string", "pattern": "y"}},
    {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "string", "pattern": "x"}}},
    meeting({"type": "string", "pattern": "x"}, {"type": "string", "maxLength": 5}),
]  # fmt: skip


@pytest.mark.parametrize("schema", MEET_NOWHERE, ids=range(len(MEET_NOWHERE)))
def test_expressions_that_never_hold_at_once_are_taken(compiler, schema):
    compiler.compile(InOrder((JsonText(schema, "f"), ENDS)))


def test_signs_of_an_intersection_in_the_text_of_a_grammar_are_text(compiler):
    grammar = LarkText('start: "a&~" /&~/ x~2 // & ~\nx: "c" # & ~', "f")
    assert taken(compiler, InOrder((grammar, ENDS)), "a&~&~cc", END) == (8, True)


def test_what_cannot_be_enforced_is_ignored_if_that_is_wanted(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "zip"}}, "required": ["a"]}
    grammar = InOrder((JsonText(schema, "", lenient=True), ENDS))
    assert taken(compiler, grammar, '{"a": "x"}', END) == (11, True)
    either = {"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}
    assert taken(compiler, InOrder((JsonText(either, "", lenient=True), ENDS)), '"a"', END) == (4, True)


def test_a_grammar_that_refers_thousands_of_rules_deep_does_no_harm(compiler):
    """The compiler recurses: on a usual stack a few hundred of these end the process."""
    assert taken(compiler, InOrder((LarkText(chain(3000), ""), ENDS)), "a", END) == (2, True)
    deep = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**deep, "d3000": {"type": "integer"}}}
    assert taken(compiler, InOrder((JsonText(schema, ""), ENDS)), "7", END) == (2, True)


def test_a_grammar_that_grows_too_complex_is_the_requests_fault(compiler):
    grammar = LarkText('start: "b" x\nx: "a"{100000000} | "c"', "")
    constraint = compiler.compile(grammar).constraint()

    def write(letters):
        for letter in letters:
            constraint.allowed()
            constraint.accept(letter)

    with pytest.raises(InvalidRequest, match="too complex"):
        write(b"baaa")
