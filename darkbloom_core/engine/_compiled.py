"""Decode steps as compiled graphs: the model's layers traced once for each shape, replayed with new data.

Always true: a compiled step gives the arrays that the eager step of the same shape gives;
a shape of several rows is traced only when it has come twice in a row, so a step that never
repeats is never traced; one of a row alone always, so that its bits do not depend on which
steps came before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx

from darkbloom_core.contracts import LoadedModel
from darkbloom_core.engine._decode import DecodeBatch, DecodeShape, LayerArrays
from darkbloom_core.engine._kv import KvPair
from darkbloom_core.engine._tracing import trace_unfused

MOST_GRAPHS = 64
"""The least recently used graph beyond this many is dropped."""

Step = Callable[[mx.array, mx.array, list[mx.array]], tuple[mx.array, list[mx.array]]]


def run_decode(
    model: LoadedModel,
    shape: DecodeShape,
    tokens: mx.array,
    offsets: mx.array,
    arrays: Sequence[LayerArrays],
) -> mx.array:
    """Logits ``[B, V]`` of one step, eagerly; KV is written into ``arrays``."""
    layers = model.description.layers
    batch = DecodeBatch(layers, shape, offsets, arrays)
    inputs = model.embed(tokens[:, None])
    return model.logits(model.run_layers(inputs, batch, 0, len(layers))[0])


class CompiledDecode:
    """Graphs of one model by shape; ``unfused``: their operations stay what they are."""

    def __init__(self, model: LoadedModel, *, unfused: bool) -> None:
        self._model = model
        self._graphs: OrderedDict[DecodeShape, Step] = OrderedDict()
        self._last: DecodeShape | None = None
        self._unfused = unfused
        self.traces = 0

    def is_worth_it(self, shape: DecodeShape) -> bool:
        """Whether ``shape`` is of one row, has a graph, or came in the step before."""
        repeated = shape == self._last
        self._last = shape
        return repeated or len(shape.lanes) == 1 or shape in self._graphs

    def run(
        self, shape: DecodeShape, tokens: mx.array, offsets: mx.array, arrays: Sequence[LayerArrays]
    ) -> mx.array:
        """As ``run_decode``; traces the shape if it has no graph yet."""
        known = self._graphs.get(shape)
        graph = known or self._graph(shape, arrays)
        call = partial(graph, tokens, offsets, _flat(arrays))
        logits, new = (
            trace_unfused(call) if known is None and self._unfused else call()
        )  # the first call traces
        self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        _put_back(arrays, new)
        return logits

    def _graph(self, shape: DecodeShape, arrays: Sequence[LayerArrays]) -> Step:
        model, form = self._model, [_Form(one) for one in arrays]
        self.traces += 1

        def step(
            tokens: mx.array, offsets: mx.array, flat: list[mx.array]
        ) -> tuple[mx.array, list[mx.array]]:
            rest = iter(flat)
            traced = [one.filled(rest) for one in form]
            return run_decode(model, shape, tokens, offsets, traced), _flat(traced)

        return mx.compile(step)


class _Form:
    """Which arrays a ``LayerArrays`` has, without holding them."""

    def __init__(self, arrays: LayerArrays) -> None:
        self._slab = arrays.slab is not None
        self._own = [pair is not None for pair in arrays.own]
        self._states = len(arrays.states)

    def filled(self, rest: Iterator[mx.array]) -> LayerArrays:
        slab = KvPair(next(rest), next(rest)) if self._slab else None
        own = [KvPair(next(rest), next(rest)) if one else None for one in self._own]
        return LayerArrays(slab, own, [next(rest) for _ in range(self._states)])


def _pairs(arrays: LayerArrays) -> list[KvPair]:
    return [pair for pair in (arrays.slab, *arrays.own) if pair is not None]


def _flat(arrays: Sequence[LayerArrays]) -> list[mx.array]:
    flat: list[mx.array] = []
    for one in arrays:
        for pair in _pairs(one):
            flat += [pair.k, pair.v]
        flat += one.states
    return flat


def _put_back(arrays: Sequence[LayerArrays], new: list[mx.array]) -> None:
    rest = iter(new)
    for one in arrays:
        for pair in _pairs(one):
            pair.k, pair.v = next(rest), next(rest)
        one.states[:] = [next(rest) for _ in one.states]
