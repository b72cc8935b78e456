"""Engines that reuse prefixes, and what they ran: for a cold and a warm request to be compared."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from toy_engine import GREEDY, request
from toy_family import VOCABULARY, ToyCodec

from darkbloom_core.contracts import MediaSpan, TierStats
from darkbloom_core.engine import Engine, EngineOptions, OutputEnd, PrefixOptions, _chunk, _runner
from darkbloom_core.engine._sampling import Sampler
from darkbloom_core.prefix import Numerics


def noise(length: int, seed: int = 0) -> list[int]:
    """Random tokens of the toys."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def numerics(layers, grid: int = 256, **changes) -> Numerics:
    members = {
        "weights": b"w" * 32, "family": "toy", "family_version": "1", "mlx_version": "1",
        "backend": "cpu", "device": "any", "layers": tuple(layers), "chunk_tokens": grid,
    }  # fmt: skip
    return Numerics(**{**members, **changes})


def prefix_options(layers, grid: int = 256, **changes) -> PrefixOptions:
    return PrefixOptions(**{"numerics": numerics(layers, grid), "secret": b"s" * 32, **changes})


@dataclass
class Ran:
    """One request: what it got, and what ran for it. ``attended`` is (query tokens, keys, mask) of each layer of each chunk."""

    tokens: list[int]
    logits: list[np.ndarray]
    end: OutputEnd
    chunks: list[tuple[int, int]]
    attended: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return self.end.usage.cached_tokens


class Warm:
    """An engine of ``model`` that reuses prefixes. ``run`` notes all that was computed for a request."""

    def __init__(
        self, model, grid: int = 256, *, grant: int = 1 << 28, share=None, codec=None, engine=None, **prefix
    ):
        self.model = model
        options = {"chunk_tokens": grid, "chained": False, "packed": False, "max_rows": 4, **(engine or {})}
        self.engine = Engine("warm", codec or ToyCodec(), lambda: model, EngineOptions(**options), share)
        self.engine.load_model()
        layers = model.description.layers
        self._scopes = 0
        self.engine.start(grant, prefix=prefix_options(layers, grid, **prefix))

    def __enter__(self):
        return self

    def __exit__(self, *fault):
        self.engine.close()

    @property
    def reuse(self):
        return self.engine._loop.reuse

    @property
    def status(self):
        return self.engine.status().prefix

    def submit(self, name: str, ids: Sequence[int], most: int = 4, **more):
        return self.engine.submit(request(name, ids, most, GREEDY, **more))

    def is_at_rest(self) -> bool:
        """Whether nothing runs, and what is reserved are the slabs and what the caches may hold."""
        status = self.engine.status()
        held = status.prefix.reserved_bytes
        shared = self.engine._share.reservations()
        return (
            status.running == status.waiting == 0
            and status.kv_bytes_reserved == status.kv_bytes_used
            and shared.get("prefix cache", 0) == held
            and self.reuse._sharing.is_empty
            and not self.reuse._uses
            and status.prefix.tiers["ram"].detail["pinned_bytes"] == 0
        )

    def run_cold(self, ids: Sequence[int], most: int = 4, **more) -> Ran:
        """Run one request in a scope that nobody was in before."""
        self._scopes += 1
        return self.run(ids, most, scope=f"cold {self._scopes}", **more)

    def run(self, ids: Sequence[int], most: int = 4, spans: Sequence[MediaSpan] = (), **more) -> Ran:
        """Run one request alone; ``pictures`` are those of its ``spans``."""
        asked = request("r", ids, most, GREEDY, **more)
        asked = replace(asked, prompt=replace(asked.prompt, spans=tuple(spans)))
        chunks: list[tuple[int, int]] = []
        attended: list[tuple[int, int, str]] = []
        kept: dict[int, np.ndarray] = {}
        attention = _chunk.attention

        def noting(q, k, v, *, scale, mask=None, sinks=None):
            kind = "array" if isinstance(mask, mx.array) else str(mask)
            attended.append((q.shape[2], k.shape[2], f"{kind} {sinks is not None}"))
            return attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

        class NotingBatch(_runner.ChunkBatch):
            def __init__(self, store, row, start, length, *others):
                chunks.append((start, length))
                super().__init__(store, row, start, length, *others)

        class Keeping(Sampler):
            def sample(self, logits, steps, *others):
                kept[steps[0]] = logits
                return super().sample(logits, steps, *others)

        with (
            patch.object(_chunk, "attention", noting),
            patch.object(_runner, "ChunkBatch", NotingBatch),
            patch.object(_runner, "Sampler", Keeping),
        ):
            *_, end = events = list(self.engine.submit(asked))
        assert end.error is None, end.error
        tokens = [ord(c) - 32 for e in events for d in getattr(e, "deltas", ()) for c in d.text]
        logits = [np.array(kept[step].astype(mx.float32))[0] for step in range(len(tokens))]
        return Ran(tokens, logits, end, chunks, attended)


class NumberCodec:
    """Token ``n`` is the character number ``32 + n``."""

    control_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def token_bytes(self, token):
        return chr(32 + token).encode()


class BytesTier:
    """A tier of bytes in a dictionary, with a thread of its own; ``gate`` holds its reads back, ``fault`` breaks it."""

    def __init__(self, parts: dict | None = None):
        self.parts = {} if parts is None else parts
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.damaged = False
        self.fetches = 0
        self.told = []
        self.threads = ThreadPoolExecutor(1)

    def probe(self, keys):
        return [len(self.parts[key]) if key in self.parts else None for key in keys]

    def fetch(self, fetches):
        if self.fault is not None:
            raise self.fault
        self.fetches += len(fetches)
        return self.threads.submit(self._read, list(fetches))

    def _read(self, fetches):
        assert self.gate.wait(10)
        for one in fetches:
            if one.key in self.parts:
                one.buffer[:] = self.parts[one.key]
        return [one.key in self.parts and not self.damaged for one in fetches]

    def offer(self, key, data):
        self.parts[key] = bytes(data)
        return True

    def used(self, keys):
        self.told.append(list(keys))
        return [key not in self.parts for key in keys]

    def forget(self, keys):
        for key in keys:
            self.parts.pop(key, None)

    def stats(self):
        return TierStats(parts=len(self.parts), bytes_used=sum(map(len, self.parts.values())))

    def close(self):
        self.gate.set()
        self.threads.shutdown()


def bits_equal(one: Ran, other: Ran) -> bool:
    """Whether every logit of every output token has the same bits."""
    return len(one.logits) == len(other.logits) and all(
        np.array_equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )
