"""A family of tiny random models of any layer pattern, and an oracle that runs them without any cache.

It knows nothing but the public contract, so what it can do a stranger's family can do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from darkbloom_core.contracts import (
    ContentDelta,
    LayerKind,
    MediaEmbeddings,
    MediaSpan,
    ModelDescription,
    PreparedPicture,
)

HEAD_DIM = 8
HIDDEN = 32
VOCABULARY = 64


def full(**changes) -> LayerKind:
    base = {"q_heads": 4, "kv_heads": 2, "k_dim": HEAD_DIM, "v_dim": HEAD_DIM, "scale": HEAD_DIM**-0.5}
    return LayerKind(**{**base, "dtype": "float32", **changes})


def window(size: int, **changes) -> LayerKind:
    return full(window=size, **changes)


def recurrent() -> LayerKind:
    return LayerKind(state=((HIDDEN,),), dtype="float32")


def describe(layers: Sequence[LayerKind], context_tokens: int = 4096) -> ModelDescription:
    return ModelDescription(
        family="toy",
        model_type="toy",
        context_tokens=context_tokens,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        layers=tuple(layers),
    )


class ToySeam:
    """Implements ``VisionSeam``: a picture of ``n`` soft tokens is an array of ``n`` numbers.

    ``looks`` has (first, last) of each range of tower layers that was run, and starts as ``"start"``.
    A picture that begins with ``fail_on`` raises in the tower's second layer.
    """

    tower_layers = 4
    most_soft_tokens = 12
    most_frames = 4
    soft_token_bytes = 8

    def __init__(self, seed: int = 1, fail_on: float | None = None):
        random = np.random.default_rng(seed)
        self.first = mx.array(random.normal(0, 1, (1, HIDDEN)).astype(np.float32))
        self.weights = [
            mx.array(random.normal(0, 0.2, (HIDDEN, HIDDEN)).astype(np.float32)) for _ in range(4)
        ]
        self.looks: list = []
        self.fail_on = fail_on
        self._failing = False
        mx.eval(self.first, self.weights)

    def soft_tokens(self, height, width, *, video):
        return max(1, min(self.most_soft_tokens, height * width // 64))

    def prepare(self, pixels, *, video):
        count = self.soft_tokens(*pixels.shape[:2], video=video)
        return toy_picture(pixels.reshape(-1)[:count].astype(np.float64) / 255)

    def start(self, picture):
        self.looks.append("start")
        numbers = picture.arrays["numbers"]
        self._failing = self.fail_on is not None and numbers[0] == self.fail_on
        return (mx.array(numbers.astype(np.float32))[:, None] * self.first,)

    def run_layers(self, inputs, first, last):
        self.looks.append((first, last))
        if self._failing and last > 1:
            raise RuntimeError("this picture fails")
        (x,) = inputs
        for weight in self.weights[first:last]:
            x = x + mx.tanh(mx.mean(x, axis=0, keepdims=True) @ weight)
        return (x,)

    def finish(self, inputs):
        return inputs[0]

    def look(self, picture):
        """The whole tower at once."""
        looks = list(self.looks)
        found = self.finish(self.run_layers(self.start(picture), 0, self.tower_layers))
        self.looks = looks
        return found


def toy_picture(numbers) -> PreparedPicture:
    """A picture of as many soft tokens as there are ``numbers``."""
    array = np.asarray(numbers, np.float64)
    return PreparedPicture(len(array), {"numbers": array}, hashlib.sha256(array.tobytes()).digest())


@dataclass
class ToyModel:
    """Implements ``LoadedModel``; embedding ``fail_on`` tokens at once raises."""

    layers: Sequence[LayerKind]
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    context_tokens: int = 4096
    fail_on: int | None = None
    vision: ToySeam | None = None
    embeds: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self):
        random = np.random.default_rng(self.seed)

        def weight(rows: int, columns: int) -> mx.array:
            return mx.array(random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32))

        self.description = describe(self.layers, self.context_tokens)
        self.table = mx.array(random.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float32))
        self.head = weight(VOCABULARY, HIDDEN)
        self.weights = []
        for kind in self.layers:
            entry = {"mlp": weight(HIDDEN, HIDDEN)}
            if kind.state:
                entry["decay"] = mx.array(random.uniform(0.5, 0.9, HIDDEN).astype(np.float32))
            else:
                entry["q"] = weight(kind.q_heads * kind.k_dim, HIDDEN)
                entry["o"] = weight(HIDDEN, kind.q_heads * kind.v_dim)
                if kind.source is None:
                    entry["k"] = weight(kind.kv_heads * kind.k_dim, HIDDEN)
                    entry["v"] = weight(kind.kv_heads * kind.v_dim, HIDDEN)
                if kind.sinks:
                    entry["sinks"] = mx.array(random.normal(0, 1, kind.q_heads).astype(np.float32))
            self.weights.append(entry)
        mx.eval(self.table, self.head, self.weights)

    @property
    def weight_bytes(self) -> int:
        return self.table.nbytes

    def embed(self, ids, media=None):
        if ids.shape[1] == self.fail_on:
            raise RuntimeError("this length fails")
        self.embeds.append(tuple(ids.shape))
        x = self.table[ids]
        for span, embeddings in zip(media.spans, media.embeddings, strict=True) if media else ():
            x[:, span.start : span.start + span.length] = embeddings
        return (x,)

    def run_layers(self, inputs, batch, first, last):
        (x,) = inputs
        for index in range(first, last):
            x = self._layer(index, x, batch)
        return (x,)

    def logits(self, hidden):
        return (hidden[:, -1] * mx.rsqrt(mx.mean(hidden[:, -1] ** 2, -1, keepdims=True))) @ self.head.T

    def _layer(self, index, x, batch):
        kind, weight, cache = self.layers[index], self.weights[index], batch.caches[index]
        h = x * mx.rsqrt(mx.mean(x**2, -1, keepdims=True))
        if kind.state:
            (state,) = cache.state()
            outs = []
            for step in range(h.shape[1]):
                state = weight["decay"] * state + h[:, step]
                outs.append(state)
            cache.set_state((state,))
            out = mx.stack(outs, axis=1)
        else:
            q, k, v = self._qkv(kind, weight, h, batch.offsets)
            sinks = weight.get("sinks")
            out = cache.attend(q, k, v) if sinks is None else cache.attend(q, k, v, sinks=sinks)
            out = out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ weight["o"].T
        x = x + out
        return x + mx.tanh(x @ weight["mlp"].T)

    def _qkv(self, kind, weight, h, offsets):
        def heads(name, dim):
            return (h @ weight[name].T).reshape(*h.shape[:2], -1, dim).swapaxes(1, 2)

        def rope(y):
            return mx.fast.rope(y, kind.k_dim, traditional=False, base=100.0, scale=1.0, offset=offsets)

        q = rope(heads("q", kind.k_dim))
        if kind.source is not None:
            return q, None, None
        return q, rope(heads("k", kind.k_dim)), heads("v", kind.v_dim)

    def oracle(self, ids: Sequence[int], spans: Sequence[MediaSpan] = (), pictures=()) -> np.ndarray:
        """Logits ``[L, V]`` of the whole sequence at once, by dense masks and no cache."""
        batch = _OracleBatch(self.layers, len(ids), spans)
        media = MediaEmbeddings(tuple(spans), tuple(self.vision.look(pictures[s.picture]) for s in spans))
        (x,) = self.run_layers(self.embed(mx.array([list(ids)]), media), batch, 0, len(self.layers))
        self.embeds.pop()
        return np.array(self.logits(x.reshape(len(ids), 1, HIDDEN)))

    def greedy(
        self, ids: Sequence[int], count: int, spans: Sequence[MediaSpan] = (), pictures=()
    ) -> list[int]:
        """The next ``count`` tokens by arg-max of the oracle; stops after a stop id."""
        out: list[int] = []
        while len(out) < count and not (out and out[-1] in self.stop_ids):
            out.append(int(self.oracle([*ids, *out], spans, pictures)[-1].argmax()))
        return out


class _OracleBatch:
    def __init__(self, layers, length, spans=()):
        self.offsets = mx.array([0])
        self.caches = []
        for kind in layers:
            source = None if kind.source is None else self.caches[kind.source]
            self.caches.append(_OracleCache(kind, length, source, spans))


class _OracleCache:
    def __init__(self, kind, length, source, spans=()):
        self.kind, self.source = kind, source
        i, j = mx.arange(length)[:, None], mx.arange(length)[None]
        self.mask = j <= i
        for span in spans if kind.spans == "window" else ():
            of_picture = (mx.arange(length) >= span.start) & (mx.arange(length) < span.start + span.length)
            self.mask = self.mask | (of_picture[:, None] & of_picture[None])
        if kind.window is not None:
            self.mask = self.mask & (j > i - kind.window)

    def attend(self, q, k, v, *, sinks=None):
        if self.source is not None:
            k, v = self.source.kv
        self.kv = (k, v)
        repeat = q.shape[1] // k.shape[1]
        k, v = mx.repeat(k, repeat, axis=1), mx.repeat(v, repeat, axis=1)
        scores = mx.where(self.mask, self.kind.scale * q @ k.swapaxes(-1, -2), -mx.inf)
        if sinks is not None:
            column = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            scores = mx.concatenate([scores, column], axis=-1)
        weights = mx.softmax(scores, axis=-1)
        return weights[..., : k.shape[2]] @ v

    def state(self):
        return (mx.zeros((1, HIDDEN)),)

    def set_state(self, new):
        pass


class ToyCodec:
    """Token ``n`` is the character ``chr(32 + n)``, unless ``table`` says other bytes or it is a control token."""

    vocab_size = VOCABULARY

    def __init__(self, table: dict[int, bytes] | None = None, control_ids: frozenset[int] = frozenset()):
        self.table = table or {}
        self.control_ids = control_ids

    def token_bytes(self, token: int) -> bytes:
        if token in self.table:
            return self.table[token]
        return b"" if token in self.control_ids else bytes([32 + token])

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(ord(character) - 32 for character in text)


def tokens_of(events) -> list[int]:
    """The tokens behind the text of a codec without a table."""
    return [ord(character) - 32 for character in text_of(events)]


def text_of(events) -> str:
    return "".join(
        delta.text
        for event in events
        for delta in getattr(event, "deltas", ())
        if isinstance(delta, ContentDelta)
    )
