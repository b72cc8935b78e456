"""The room with real rows: what it keeps of one prompt lets another row go on with the same bits, recomputing nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_family import ToyModel, full, recurrent, window

from darkbloom_core.contracts import PartKey
from darkbloom_core.engine import KvStore, step_batch
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.prefix import (
    BLOCK_TOKENS,
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


def packed(layout, captured, block, part, end):
    """One array of the part of ``block``, out of what ``KvStore.capture`` gave of a chunk that ends at ``end``."""
    pieces = []
    for piece in layout.pieces(block, part):
        array = array_of(piece, captured[piece.layer])
        if part != "state":
            first = block * BLOCK_TOKENS + piece.first_token - (end - array.shape[2])
            assert first >= 0
            array = array[:, :, first : first + piece.tokens]
        assert array.shape[1:] == piece.shape
        pieces.append(array.flatten())
    flat = mx.concatenate(pieces)
    mx.eval(flat)
    assert flat.nbytes == layout.part_bytes(block, part)
    return flat


def unpacked(layout, store, row, block, parts):
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
        for piece in layout.pieces(block, part):
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
        self.policy = TailPolicy(self.layout)
        self.store = KvStore(layers, 4, 0)

    def run(self, ids, decode, *, cached=True):
        """(chunks that ran, logits of the last prompt token and of each token of ``decode``)."""
        cuts = []
        while not cuts or cuts[-1] < len(ids):
            cuts.append(chunk_end(cuts[-1] if cuts else 0, len(ids), self.grid))
        names = block_hashes(ids, cuts, b"root")
        row = self.store.open_row(len(ids), len(ids) + len(decode))
        start = self._adopt(row, cuts, names) if cached else 0
        chunks, logits = (
            [(begin, end) for begin, end in zip([0, *cuts], cuts, strict=False) if begin >= start],
            [],
        )
        tails = self.policy.to_keep(cuts, names)
        for begin, end in chunks:
            logits = [self._step(row, ids[begin:end], begin)]
            if cached and end % self.grid == 0:
                self._keep(row, names, begin, end, tails)
        for place, token in enumerate(decode):
            logits.append(self._step(row, [token], len(ids) + place))
        self.store.close_row(row)
        return chunks, np.stack(logits)

    def _step(self, row, ids, position):
        batch = step_batch(self.store, [row], [position], len(ids))
        (hidden,) = self.model.run_layers(self.model.embed(mx.array([ids])), batch, 0, len(self.model.layers))
        return np.array(self.model.logits(hidden[:, -1:]))[0]

    def _adopt(self, row, cuts, names):
        plan = plan_reuse(
            cuts,
            self.layout,
            lambda block, part: RAM if self.ram.probe(PartKey(names[block], part)) is not None else None,
            COSTS,
        )
        if plan.missed_boundary is not None:
            self.policy.missed(names[plan.missed_boundary // BLOCK_TOKENS - 1])
        with self.ram.pin([PartKey(names[one.block], one.part) for one in plan.fetches]) as pins:
            items = {(one.block, one.part): item for one, item in zip(plan.fetches, pins.items, strict=True)}
        for block in range(plan.tokens // BLOCK_TOKENS):
            parts = {part: items[block, part] for part in PART_NAMES if (block, part) in items}
            taken = unpacked(self.layout, self.store, row, block, parts)
            self.store.restore(row, taken, (block + 1) * BLOCK_TOKENS)
        return plan.tokens

    def _keep(self, row, names, begin, end, tails):
        captured = self.store.capture(row, begin, end)
        for block in range(begin // BLOCK_TOKENS, end // BLOCK_TOKENS):
            for part in PART_NAMES:
                size = self.layout.part_bytes(block, part)
                if size and (part == "full" or (block, part) in tails):
                    item = packed(self.layout, captured, block, part, end)
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


@settings(deadline=None, max_examples=8)
@given(
    patterns(), st.sampled_from((256, 512)), st.integers(0, 2**16), st.integers(1, 1400), st.integers(1, 300)
)
def test_a_warm_request_runs_the_rest_of_the_cold_ones_chunks_and_has_its_bits(
    layers, grid, seed, length, more
):
    random = np.random.default_rng(seed)
    ids = random.integers(0, 64, length).tolist()
    grown = [*ids, *random.integers(0, 64, more).tolist()]
    decode = random.integers(0, 64, 4).tolist()
    machine = Machine(layers, grid)
    for prompt, before in ((ids, 0), (ids, length - 1), (grown, length)):
        cold_chunks, cold = machine.run(prompt, decode, cached=False)
        chunks, warm = machine.run(prompt, decode)
        reused = chunks[0][0]
        assert chunks == [chunk for chunk in cold_chunks if chunk[0] >= reused]
        assert reused >= before - grid
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
