"""Toy models that see, for servers: where their pictures stand, and pictures that are slow or fail on purpose."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
from media_files import data_uri, picture_file
from PIL import Image
from toy_family import ToySeam, full, window
from toy_server import SlowModel, ToyChatCodec, ToyFamily

from darkbloom_core.contracts import MediaPart, MediaSpan, Prompt

LAYERS = (window(16, spans="window"), full())
BREAKS_HOST, BREAKS_TOWER = 13, 51
"""A grey of this value, first in a picture, fails when the picture is prepared, or in the tower."""

WHICH_FAIL = {"prepared": BREAKS_HOST, "looked at": BREAKS_TOWER}


class GatedSeam(ToySeam):
    """Prepares pictures while ``gate`` is set; ``entered`` says that one has come to it."""

    def __init__(self):
        super().__init__(fail_on=BREAKS_TOWER / 255)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def prepare(self, pixels, *, video):
        self.entered.set()
        assert self.gate.wait(20)
        if pixels.flat[0] == BREAKS_HOST:
            raise RuntimeError("this picture breaks")
        return super().prepare(pixels, video=video)

    def shut(self):
        """Hold what comes from now on."""
        self.entered.clear()
        self.gate.clear()


class SeeingCodec(ToyChatCodec):
    """A picture is its soft tokens, each token 0, in its place among the text."""

    def encode_chat(self, chat):
        ids, spans = [], []
        for message in chat.messages:
            ids += self.encode_text(f"{message.role}>")
            for part in message.content:
                if not isinstance(part, MediaPart):
                    ids += self.encode_text(part.text)
                    continue
                for length in part.soft_tokens:
                    ids += self.encode_text("[")
                    spans.append(MediaSpan(len(ids), length, len(spans)))
                    ids += [0] * length
        return Prompt(tuple(ids), tuple(spans))


class SeeingFamily(ToyFamily):
    """A model whose config says ``sees`` does; any other is a plain toy."""

    def describe(self, config, device):
        return _seeing(super().describe(config, device), config)

    def codec(self, path, description):
        config = json.loads((path / "config.json").read_text())
        return (
            SeeingCodec(config.get("seconds", 0.0))
            if config.get("sees")
            else super().codec(path, description)
        )

    def load(self, path, description, placement, progress=None):
        config = json.loads((path / "config.json").read_text())
        if not config.get("sees"):
            return super().load(path, description, placement, progress)
        model = SlowModel(LAYERS, context_tokens=description.context_tokens, vision=GatedSeam())
        model.seconds, model.description = config.get("seconds", 0.0), _seeing(model.description, config)
        return model


def _seeing(description, config):
    if not config.get("sees"):
        return description
    return replace(description, layers=LAYERS, modalities=frozenset({"text", "image", "video"}))


def grey(value: int, width: int = 16, height: int = 16) -> str:
    """A PNG of one grey as a data: URI."""
    pixels = np.full((height, width, 3), value, np.uint8)
    return data_uri(picture_file(Image.fromarray(pixels)), "image/png")
