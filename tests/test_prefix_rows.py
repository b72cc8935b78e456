"""The room with real rows: what it keeps of one prompt lets another row go on with the same bits, recomputing nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import ToyModel, full, recurrent, window

from darkbloom_core.contracts import MediaSpan, PartKey
from darkbloom_core.engine import KvStore, step_batch
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.prefix import (
    PART_NAMES,
    RAM,
    Costs,
    PartLayout,
    RamTier,
    TailPolicy,
    block_hashes,
    plan_reuse,
)

COSTS = Costs(prefill_milliseconds_per_token=1.0, fetch_milliseconds_per_byte={RAM: 0.0})


def array_of(piece, arrays):
    """``arrays`` are K and V, or the states, of the piece's layer."""
    return arrays[
        "kv".index(piece.name) if piece.name in ("k", "v") else int(piece.name.removeprefix("state"))
    ]


def packed(parts, captured, block, part, end):
    """One array of the part of ``block``, out of what ``KvStore.capture`` gave of a chunk that ends at ``end``."""
    pieces = []
    for piece in parts.pieces(block, part):
        array = array_of(piece, captured[piece.layer])
        if part != "state":
            first = parts.blocks[block].start + piece.first_token - (end - array.shape[2])
            assert first >= 0
            array = array[:, :, first : first + piece.tokens]
        assert array.shape[1:] == piece.shape
        pieces.append(array.flatten())
    flat = mx.concatenate(pieces)
    mx.eval(flat)
    assert flat.nbytes == parts.part_bytes(block, part)
    return flat


def unpacked(prompt, store, row, block, parts):
    """What ``KvStore.restore`` takes: layer by layer, nothing of a layer that has nothing in these parts."""
    layers = []
    for index, kind in enumerate(store.layers):
        if kind.state:
            layers.append([array[row.lane : row.lane + 1] for array in store.states[index]])
        elif kind.source is None:
            layers.append([mx.zeros((1, kind.kv_heads, 0, dim)) for dim in (kind.k_dim, kind.v_dim)])
        else:
            layers.append([])
    for part, flat in parts.items():
        for piece in prompt.pieces(block, part):
            first = piece.offset_bytes // flat.itemsize
            array = flat[first : first + piece.size_bytes // flat.itemsize].reshape(1, *piece.shape)
            layers[piece.layer][
                "kv".index(piece.name) if piece.name in ("k", "v") else int(piece.name.removeprefix("state"))
            ] = array
    return tuple(tuple(arrays) for arrays in layers)


class Machine:
    """Prefills prompts with a cache, by hand, as the engine will."""

    def __init__(self, layers, grid):
        self.model = ToyModel(layers)
        self.grid = grid
        self.layout = PartLayout(layers, grid)
        self.ram = RamTier(10**9)
        self.policy = TailPolicy()
        self.store = KvStore(layers, 4, 0)

    def run(self, ids, decode, spans=(), *, cached=True):
        """(chunks that ran, logits of the last prompt token and of each token of ``decode``).

        ``spans`` are where pictures would be: they move the cuts, and nobody looks at them.
        """
        cuts = []
        while not cuts or cuts[-1] < len(ids):
            cuts.append(chunk_end(cuts[-1] if cuts else 0, len(ids), self.grid, spans))
        names, parts = block_hashes(ids, cuts, b"root"), self.layout.of(cuts)
        row = self.store.open_row(len(ids), len(ids) + len(decode))
        start = self._adopt(row, parts, names) if cached else 0
        chunks, logits = (
            [(begin, end) for begin, end in zip([0, *cuts], cuts, strict=False) if begin >= start],
            [],
        )
        tails = self.policy.to_keep(parts, names)
        for begin, end in chunks:
            logits = [self._step(row, ids[begin:end], begin)]
            if cached and parts.is_line(end):
                self._keep(row, parts, names, begin, end, tails)
        for place, token in enumerate(decode):
            logits.append(self._step(row, [token], len(ids) + place))
        self.store.close_row(row)
        return chunks, np.stack(logits)

    def _step(self, row, ids, position):
        batch = step_batch(self.store, [row], [position], len(ids))
        (hidden,) = self.model.run_layers(self.model.embed(mx.array([ids])), batch, 0, len(self.model.layers))
        return np.array(self.model.logits(hidden[:, -1:]))[0]

    def _adopt(self, row, prompt, names):
        plan = plan_reuse(
            prompt,
            lambda block, part: RAM if self.ram.probe(PartKey(names[block], part)) is not None else None,
            COSTS,
        )
        if plan.missed_boundary is not None:
            self.policy.missed(names[prompt.count(plan.missed_boundary) - 1])
        with self.ram.pin([PartKey(names[one.block], one.part) for one in plan.fetches]) as pins:
            items = {(one.block, one.part): item for one, item in zip(plan.fetches, pins.items, strict=True)}
        for block in range(prompt.count(plan.tokens) if plan.tokens else 0):
            parts = {part: items[block, part] for part in PART_NAMES if (block, part) in items}
            taken = unpacked(prompt, self.store, row, block, parts)
            self.store.restore(row, taken, prompt.blocks[block].end)
        return plan.tokens

    def _keep(self, row, prompt, names, begin, end, tails):
        captured = self.store.capture(row, begin, end)
        for block in (number for number, one in enumerate(prompt.blocks) if begin <= one.start < end):
            for part in PART_NAMES:
                size = prompt.part_bytes(block, part)
                if size and (part == "full" or (block, part) in tails):
                    item = packed(prompt, captured, block, part, end)
                    parent = names[block - 1] if block else None
                    self.ram.keep(
                        PartKey(names[block], part), item, size, saves_milliseconds=1.0, parent=parent
                    )


@st.composite
def patterns(draw):
    layers = []
    for index in range(draw(st.integers(1, 4))):
        kinds = [
            full(),
            window(draw(st.sampled_from((1, 100, 256, 300, 512, 600)))),
            recurrent(),
            full(sinks=True),
        ]
        sources = [at for at in range(index) if layers[at].source is None and not layers[at].state]
        if sources:
            source = draw(st.sampled_from(sources))
            kinds.append(full(source=source, window=layers[source].window))
        layers.append(draw(st.sampled_from(kinds)))
    return layers


@st.composite
def places(draw):
    """Where pictures are in the first part of a prompt: anywhere, of any length, some of them touching."""
    spans, at = [], 0
    for number in range(draw(st.integers(0, 4))):
        start = at + draw(st.integers(0, 150))
        at = start + draw(st.integers(1, 300))
        spans.append(MediaSpan(start, at - start, number))
    return tuple(spans)


@settings(deadline=None, max_examples=4)
@given(
    patterns(),
    st.sampled_from((256, 512)),
    st.integers(0, 2**16),
    places(),
    st.integers(1, 500),
    st.integers(1, 200),
)
def test_a_warm_request_runs_the_rest_of_the_cold_ones_chunks_and_has_its_bits(
    layers, grid, seed, spans, text, more
):
    random = np.random.default_rng(seed)
    length = text + max((span.start + span.length for span in spans), default=0)
    ids = random.integers(0, 64, length).tolist()
    grown = [*ids, *random.integers(0, 64, more).tolist()]
    decode = random.integers(0, 64, 4).tolist()
    machine = Machine(layers, grid)
    for prompt, before in ((ids, 0), (ids, length - 1), (grown, length)):
        cold_chunks, cold = machine.run(prompt, decode, spans, cached=False)
        chunks, warm = machine.run(prompt, decode, spans)
        reused = chunks[0][0]
        assert chunks == [chunk for chunk in cold_chunks if chunk[0] >= reused]
        if before:  # all but the last chunk of what came before, which then ended where that did
            assert reused >= max(begin for begin, _ in cold_chunks if begin < before or begin == 0)
        assert np.array_equal(warm, cold)


def test_a_branch_is_reused_from_the_third_request_on_with_the_same_bits():
    machine = Machine([window(300), full(), recurrent(), window(600)], 256)
    random = np.random.default_rng(0)
    system = random.integers(0, 64, 800).tolist()
    reused = []
    for user in range(3):
        prompt = [*system, *[user] * 500]
        _, cold = machine.run(prompt, [1, 2], cached=False)
        chunks, warm = machine.run(prompt, [1, 2])
        reused.append(chunks[0][0])
        assert np.array_equal(warm, cold)
    assert reused == [0, 0, 768]
