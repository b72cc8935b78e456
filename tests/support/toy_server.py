"""A family of toy models that can be served, and a server on a free port with every part real but the weights.

A model's config says how it behaves: how long its context is (``context_tokens``), how
long a layer of a prefill slice and a token of an output take (``seconds``), which token
cannot be turned into text (``breaks_on``), whether it sees pictures (``sees``) and
can be kept to formats (``fits_formats``). Its output is noise, but noise in a format: some tokens are
control tokens that begin and end reasoning and tool calls.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

from at_rest import AtRest
from toy_family import ToyCodec, ToyModel, ToySeam, describe, full, window

from darkbloom_core.contracts import (
    ContentDelta,
    ControlToken,
    InOrder,
    Malformed,
    MediaPart,
    MediaSpan,
    Prompt,
    ReasoningDelta,
    ToolCallDelta,
)
from darkbloom_core.errors import InvalidRequest
from darkbloom_core.server import BackgroundServer, create_app, generation_service
from darkbloom_core.settings import Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

THINK, CALL, BROKEN = 61, 62, 63
"""Control tokens: reasoning begins or ends, a tool call begins or ends, the output is malformed."""

LAYERS = (window(16), full())


class ToyParser:
    def __init__(self):
        self.mode = "content"
        self.calls = -1

    def control(self, token):
        if token == BROKEN:
            return (Malformed("a broken token"),)
        wanted = "reasoning" if token == THINK else "call"
        self.mode = "content" if self.mode == wanted else wanted
        if self.mode != "call":
            return ()
        self.calls += 1
        return (ToolCallDelta(self.calls, "lookup"),)

    def text(self, text):
        if self.mode == "content":
            return (ContentDelta(text),)
        return (
            (ReasoningDelta(text),) if self.mode == "reasoning" else (ToolCallDelta(self.calls, None, text),)
        )

    def finish(self):
        return ()


class ToyChatCodec(ToyCodec):
    """Upper case only; what has no token becomes one that is near, so no text is refused."""

    def __init__(self, seconds=0.0, breaks_on=None, fits_formats=True):
        super().__init__(control_ids=frozenset({THINK, CALL, BROKEN}))
        self.seconds, self.breaks_on, self.fits_formats = seconds, breaks_on, fits_formats

    def token_bytes(self, token):
        time.sleep(self.seconds)
        if token == self.breaks_on:
            raise RuntimeError("this token breaks")
        return super().token_bytes(token)

    def encode_text(self, text):
        return tuple(min(max(ord(character) - 32, 0), THINK - 1) for character in text.upper())

    def encode_chat(self, chat):
        if chat.reasoning_effort == "impossible":
            raise InvalidRequest("this model cannot do that", param="reasoning_effort")
        ids: tuple[int, ...] = ()
        spans: list[MediaSpan] = []
        for message in chat.messages:
            ids += self.encode_text(f"{message.role}>{message.text};")
            for part in message.content:
                for length in part.soft_tokens if isinstance(part, MediaPart) else ():
                    spans.append(MediaSpan(len(ids), length, len(spans)))
                    ids += (0,) * length
        return Prompt(ids, tuple(spans))

    def grammar(self, chat):
        """An answer that must fit a format ends with the token that means a broken output."""
        if not self.fits_formats:
            return None
        return None if chat.answer is None else InOrder((chat.answer.text, ControlToken(BROKEN)))

    def parser(self, chat):
        return ToyParser()


class SlowModel(ToyModel):
    seconds = 0.0

    def run_layers(self, inputs, batch, first, last):
        if inputs[0].shape[1] > 1:
            time.sleep(self.seconds * (last - first))
        return super().run_layers(inputs, batch, first, last)


class ToyFamily:
    name, version, model_types = "toy", "1", frozenset({"toy"})

    def describe(self, config, device):
        modalities = {"text", "image", "video"} if config.get("sees") else {"text"}
        description = describe(LAYERS, config.get("context_tokens", 4096))
        return replace(description, modalities=frozenset(modalities))

    def codec(self, path, description):
        config = json.loads((path / "config.json").read_text())
        return ToyChatCodec(
            config.get("seconds", 0.0), config.get("breaks_on"), config.get("fits_formats", True)
        )

    def load(self, path, description, placement, progress=None):
        config = json.loads((path / "config.json").read_text())
        model = SlowModel(
            LAYERS,
            seed=config.get("weights", 0),
            context_tokens=description.context_tokens,
            stop_ids=frozenset(config.get("stop_ids", [])),
            vision=ToySeam() if config.get("sees") else None,
        )
        model.seconds = config.get("seconds", 0.0)
        return model


class RecordingSink:
    name = "recording"

    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def close(self):
        pass

    def take(self, *kinds):
        """The events of these kinds since the last call, in order."""
        events, self.events = self.events, []
        return [event for event in events if isinstance(event, kinds)]


class ToyServer:
    """``slots``, ``sink``, ``app``, and ``url`` once it runs."""

    def __init__(
        self,
        folder: Path,
        models: dict[str, dict],
        sinks=(),
        plugin_routes=(),
        plugin_reports=tuple,
        family=ToyFamily,
        **tables,
    ):
        self.settings = Settings(
            **{"memory": {"kv_bytes": 64 * 2**20}, "telemetry": {"sample_seconds": 0}, **tables}
        )
        self.sink = RecordingSink()
        self.emitter = SinkEmitter([self.sink, *sinks])
        self.slots = SlotManager(self.settings, lambda config: family(), self.emitter)
        self.app = create_app(self.slots, self.settings, self.emitter, plugin_routes, plugin_reports)
        for name, config in models.items():
            path = folder / name.replace("/", "-")
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
            self.slots.load(name, path)
        self.wait_until_idle = AtRest(generation_service(self.app)).wait

    def engine(self, name):
        return self.slots.get(name).engine

    @contextlib.contextmanager
    def running(self):
        with BackgroundServer(self.app) as server:
            self.url = server.url
            self.background = server
            yield self
        self.slots.close()
