"""A family whose models say what a script says, so that a test can ask what becomes of any answer.

A model's config has ``scripts``: a question to the pieces of its answer, a token each. A piece is text, or
``{"think": true}`` (reasoning begins), ``{"call": NAME}`` (the arguments of a call begin), ``{"say": true}``
(back to the answer) or ``{"break": true}`` (the engine fails here). ``seconds`` is how long a token takes.
All scripts together have at most as many pieces as the toys have tokens.
"""

from __future__ import annotations

import json
import time

import mlx.core as mx
from toy_family import VOCABULARY, ToyCodec, ToyModel, describe
from toy_server import LAYERS

from darkbloom_core.contracts import ContentDelta, Prompt, ReasoningDelta, ToolCallDelta


def read_scripts(path):
    """The first token of each question, what each token says, and the tokens that end an answer."""
    config = json.loads((path / "config.json").read_text())
    starts, pieces, stops = {}, {}, set()
    for question, answer in config["scripts"].items():
        starts[question] = len(starts) + len(pieces) + len(stops)
        for index, piece in enumerate(answer, starts[question] + 1):
            pieces[index] = piece
        stops.add(starts[question] + len(answer) + 1)
    assert len(starts) + len(pieces) + len(stops) <= VOCABULARY
    return starts, pieces, stops


class ScriptedModel(ToyModel):
    """After each token comes the next one."""

    def run_layers(self, inputs, batch, first, last):
        super().run_layers(inputs, batch, first, last)
        return inputs

    def logits(self, hidden):
        def unit(rows):
            return rows * mx.rsqrt(mx.sum(rows**2, -1, keepdims=True))

        before = unit(self.table[mx.array([index - 1 for index in range(VOCABULARY)])])
        return 100 * unit(hidden[:, -1]) @ before.T


class ScriptedParser:
    def __init__(self, pieces):
        self.pieces, self.mode, self.calls = pieces, "say", -1

    def control(self, token):
        piece = self.pieces.get(token, {"say": True})
        (self.mode,) = piece
        if self.mode != "call":
            return ()
        self.calls += 1
        return (ToolCallDelta(self.calls, piece["call"]),)

    def text(self, text):
        if self.mode == "call":
            return (ToolCallDelta(self.calls, None, text),)
        return (ReasoningDelta(text),) if self.mode == "think" else (ContentDelta(text),)

    def finish(self):
        return ()


class ScriptedCodec(ToyCodec):
    def __init__(self, path):
        self.seconds = json.loads((path / "config.json").read_text()).get("seconds", 0)
        self.starts, self.pieces, stops = read_scripts(path)
        said = {token: piece.encode() for token, piece in self.pieces.items() if isinstance(piece, str)}
        controls = {token for token, piece in self.pieces.items() if not isinstance(piece, str)}
        breaks = {token for token in controls if "break" in self.pieces[token]}
        super().__init__(said, frozenset((controls - breaks) | stops))
        self.breaks = breaks

    def token_bytes(self, token):
        time.sleep(self.seconds)
        if token in self.breaks:
            raise RuntimeError("the script breaks here")
        return super().token_bytes(token)

    def encode_chat(self, chat):
        asked = next(each.text for each in reversed(chat.messages) if each.role in ("user", "tool"))
        return Prompt((0, self.starts[asked]))

    def grammar(self, chat):
        return None

    def parser(self, chat):
        return ScriptedParser(self.pieces)


class ScriptedFamily:
    name, version, model_types = "scripted", "1", frozenset({"toy"})

    def describe(self, config, device):
        return describe(LAYERS, config.get("context_tokens", 4096))

    def codec(self, path, description):
        return ScriptedCodec(path)

    def load(self, path, description, placement, progress=None):
        _, _, stops = read_scripts(path)
        return ScriptedModel(LAYERS, stop_ids=frozenset(stops), context_tokens=description.context_tokens)
