"""The syntax of tool calls: what it means as JSON, and what is no call."""

import json

import pytest
from darkbloom_gemma4._calls import DEEPEST, parse_calls

QUOTE = '<|"|>'


def pieces(text):
    """``text`` as a parser collects it: None for each quote token."""
    first, *others = text.split(QUOTE)
    found = [first]
    for each in others:
        found += [None, each]
    return found


def one(text):
    parsed = parse_calls(pieces(text))
    assert parsed.rest == ""
    ((name, arguments),) = parsed.calls
    return name, json.loads(arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call:now{}", ("now", {})),
        ("call:f{a:1,b:-2.50,c:1e3}", ("f", {"a": 1, "b": -2.5, "c": 1000.0})),
        (
            "call:f{a:true,b:false,c:null,d:None,e:True}",
            ("f", {"a": True, "b": False, "c": None, "d": None, "e": True}),
        ),
        ('call:f{city:<|"|>Paris<|"|>}', ("f", {"city": "Paris"})),
        ('call:f{empty:<|"|><|"|>}', ("f", {"empty": ""})),
        ('call:f{<|"|>a key<|"|>:1}', ("f", {"a key": 1})),
        (
            "call:f{list:[1,[2,{x:3}],[]],table:{y:{}}}",
            ("f", {"list": [1, [2, {"x": 3}], []], "table": {"y": {}}}),
        ),
        (' call:f{ a : 1 ,\n b : <|"|> kept <|"|> } ', ("f", {"a": 1, "b": " kept "})),
        ("call:f{a:1,}", ("f", {"a": 1})),
        ("call:web-browsing.open{u:1}", ("web-browsing.open", {"u": 1})),
        # Not the publisher's syntax, but clear.
        ('call:f{a:"x, y}",b:Paris}', ("f", {"a": "x, y}", "b": "Paris"})),
        ("call:f{zip:007,big:1e,word:-}", ("f", {"zip": "007", "big": "1e", "word": "-"})),
        ("call:f{at:12:30}", ("f", {"at": "12:30"})),
        ('call:f{a:NaN,b:"\\ud800"}', ("f", {"a": "NaN", "b": "\ufffd"})),
        # Braces, commas, line breaks and JSON inside quotes mean nothing.
        (
            'call:edit{path:<|"|>t.txt<|"|>,edits:[{newText:<|"|>a}b<|"|>,oldText:<|"|>say "x"<|"|>}]}',
            ("edit", {"path": "t.txt", "edits": [{"newText": "a}b", "oldText": 'say "x"'}]}),
        ),
        ('call:f{code:<|"|>if (a) { b: [1, 2] }\n}<|"|>}', ("f", {"code": "if (a) { b: [1, 2] }\n}"})),
        ('call:f{json:<|"|>{"a": "b\\n"}<|"|>}', ("f", {"json": '{"a": "b\\n"}'})),
    ],
)
def test_calls_become_json(text, expected):
    assert one(text) == expected


def test_numbers_keep_their_digits():
    ((_, arguments),) = parse_calls(["call:f{n:123456789012345678901234567890.10}"]).calls
    assert arguments == '{"n": 123456789012345678901234567890.10}'


def test_calls_may_follow_one_another():
    parsed = parse_calls(pieces('call:a{x:1} call:b{y:<|"|>2<|"|>}'))
    assert parsed.calls == (("a", '{"x": 1}'), ("b", '{"y": "2"}'))
    assert parsed.rest == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "call:f",
        "call:f{",
        "call:f{a",
        "call:f{a:",
        "call:f{a:}",
        "call:f{a:1",
        'call:f{a:<|"|>1<|"|> b:2}',
        "call:f{:1}",
        'call:f{a:<|"|>x}',
        'call:f{a:"x}',
        'call:terminal(command:<|"|>ls<|"|>)',
        "call:{a:1}",
        "call:a b{}",
        "f{a:1}",
        "call:f{a:[1,2}",
        'call:<|"|>f<|"|>{}',
    ],
)
def test_what_is_no_call_is_returned_as_text(text):
    parsed = parse_calls(pieces(text))
    assert parsed.calls == ()
    assert parsed.rest == text.replace(QUOTE, '"')


def test_a_good_call_before_a_bad_one_is_kept():
    parsed = parse_calls(["call:a{x:1}call:b{y:"])
    assert parsed.calls == (("a", '{"x": 1}'),)
    assert parsed.rest == "call:b{y:"


def test_nesting_has_a_limit_instead_of_a_recursion_error():
    for opening, closing in (("{a:", "}"), ("[", "]")):
        deep = opening * (DEEPEST - 1) + "1" + closing * (DEEPEST - 1)
        assert parse_calls([f"call:f{{x:{deep}}}"]).calls
        deeper = opening * 100_000 + "1" + closing * 100_000
        assert parse_calls([f"call:f{{x:{deeper}}}"]).calls == ()


def test_private_use_characters_are_ordinary_text():
    text = "\ue000\ue001"
    assert parse_calls(["call:f{a:", None, text, None, "}"]).calls == (("f", f'{{"a": "{text}"}}'),)
