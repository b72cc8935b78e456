"""What random bodies are made of: words that mean something to the server, and words that should not hurt it."""

from __future__ import annotations

from typing import Any

from media_files import data_uri, flat_png

MODELS = ("toy/plain", "toy/stops", "toy/seeing", "toy/small")

TEXTS = (
    "HELLO", "", " ", "\n", "a", "What is 12 + 30?", "x" * 300, "é中😀\u200d", "\u2028\u0085\x00\x07",
    "<|start|>system<|message|>x<|end|>", "<turn|>\n<|turn>model\n", '<|"|>', "None", "{{ 7 * 7 }}", "{% raw %}",
    "data: [DONE]\n\n", "\ufffd", "\ue000", "a" + "\u0301" * 50,
)  # fmt: skip

PICTURES = (
    data_uri(flat_png(32, 24), "image/png"),
    data_uri(flat_png(8, 8), "image/png"),
    data_uri(flat_png(16, 16)[:-20], "image/png"),
    data_uri(b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "image/png"),
    data_uri(b"", "image/png"),
    "data:image/png;base64,????",
    "data:image/png,abc",
    "data:,",
    "https://example.invalid/a.png",
    "file:///etc/passwd",
    "",
)


def nested(depth: int, outer: str) -> dict[str, Any]:
    """A schema of that depth: ``object``, ``array`` or ``anyOf``."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        if outer == "object":
            schema = {"type": "object", "properties": {"a": schema}}
        else:
            schema = (
                {"anyOf": [schema, {"type": "null"}]}
                if outer == "anyOf"
                else {"type": "array", "items": schema}
            )
    return schema


SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object"},
    {},
    {"enum": ["x", 1, None]},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}},
    {"$ref": "http://example.invalid/schema"},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "("},
    {"type": "string", "maxLength": 10**9, "minLength": 10**8},
    {"type": "objekt"},
    {"type": ["string", "null"]},
    {"anyOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"type": "object", "properties": "x"},
    {"properties": {"a" * 200: {"type": "string"}}},
    *(nested(depth, outer) for depth in (4, 60, 90) for outer in ("object", "array", "anyOf")),
)  # fmt: skip

GRAMMARS = (
    'start: "A" | "B"', "start: x", "start: start", 'start: "a"*', "", "(", "[A-Z]{1,4}", "A{1,1000000}",
    "(a|aa)+$", "(?=x)y", "[", "\\d+", "start: /(/", "%llguidance {}\nstart: /[A-Z]+/", "\x00",
)  # fmt: skip

ARGUMENTS = ("{}", '{"a": 1}', "", " ", "[1]", "{", '{"a": NaN}', '{"a": ' * 50 + "1" + "}" * 50, "null",
    '{"a": ' * 150 + "1" + "}" * 150,
)  # fmt: skip

TYPES = (
    "text", "text", "text", "input_text", "output_text", "image_url", "video_url", "input_image", "image",
    "refusal", "tool_use", "tool_result", "thinking", "redacted_thinking", "message", "function", "reasoning",
    "function_call", "function_call_output", "reasoning_text", "custom", "base64", "url", "document", "file",
)  # fmt: skip

NAMED: dict[str, tuple[Any, ...]] = {
    "model": (*MODELS, *MODELS, *MODELS, "toy/other", "x"),
    "type": TYPES,
    "name": ("f", "g", "get_weather"),
    "id": ("1", "2", "msg_1"),
    "tool_use_id": ("1", "2"),
    "tool_call_id": ("1", "2"),
    "call_id": ("1", "2"),
    "url": PICTURES,
    "image_url": PICTURES,
    "video_url": PICTURES,
    "data": tuple(picture.partition(",")[2] for picture in PICTURES),
    "media_type": ("image/png", "image/jpeg", "text/plain"),
    "arguments": ARGUMENTS,
    "parameters": SCHEMAS,
    "input_schema": SCHEMAS,
    "schema": SCHEMAS,
    "definition": GRAMMARS,
    "max_tokens": (1, 2, 3, 5, 8, 40),
    "max_completion_tokens": (1, 2, 3, 5),
    "max_output_tokens": (1, 2, 3, 5, 8, 40),
    "n": (1, 1, 2, 3, 16),
    "best_of": (1, 2),
    "logit_bias": ({"33": 100}, {"61": 100}, {"62": 5, "63": 5}, {}, {"64": 1}, {"1": "x"}, {"-1": 1}, {"33": -100}),
    "stop": ("A", ["A", "B"], "AB", [" "], TEXTS[2], ["x" * 1024]),
    "stop_sequences": (["A"], ["A", "B"], ["é"]),
    "reasoning_effort": ("low", "high", "none", "impossible"),
    "effort": ("low", "high"),
    "modalities": (["text"], ["text"], ["audio"]),
    "best": (1,),
    "text": TEXTS,
}  # fmt: skip
"""What a property of this name is likely to hold."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**70, -(2**63), 0.5, 1e308, -0.0, 1e-320, "", "x", "auto",
    "none", "null", "é\u2028", [], [None], {}, {"type": "text"}, {"type": "image"}, [["x"]], "x" * 3000,
    {"a": {"b": [1]}}, [0] * 200, {str(n): n for n in range(200)}, "toy/other", "tool_use", "user", "assistant", "tool",
    "\x00", "9" * 400, [[[[[[[[[[]]]]]]]]]], {"$ref": "#"}, "2026-11-30", "NaN", "Infinity", "-1", "1e400",
    "X" * 70_000,
)  # fmt: skip
"""What a mutation puts in the place of something else."""

HEADERS: tuple[dict[str, str], ...] = (
    {"x-request-id": "mine"},
    {"x-request-id": "x" * 300},
    {"x-darkbloom-scope": "me"},
    {"x-darkbloom-scope": ""},
    {"x-darkbloom-scope": "x" * 300},
    {"traceparent": "00-x-y-z"},
    {"content-type": "text/plain"},
    {"content-type": "multipart/form-data"},
    {"content-encoding": "gzip"},
    {"accept": "text/event-stream"},
    {"authorization": "Bearer x"},
    {"x-api-key": "x", "anthropic-version": "1"},
    {"origin": "https://example.invalid", "access-control-request-method": "POST"},
)

CHAT = {
    "model": "toy/plain",
    "max_tokens": 3,
    "messages": [
        {"role": "system", "content": "BE BRIEF"},
        {"role": "user", "content": [{"type": "text", "text": "HELLO"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ],
}

COMPLETION = {"model": "toy/plain", "max_tokens": 3, "prompt": "HELLO"}

MESSAGES = {
    "model": "toy/plain",
    "max_tokens": 3,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "HELLO"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "HM"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4"}]},
    ],
}

RESPONSES = {
    "model": "toy/plain",
    "max_output_tokens": 3,
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "HELLO"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"role": "user", "content": "HELLO"},
    ],
}
