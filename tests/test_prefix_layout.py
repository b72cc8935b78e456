"""What the parts of blocks are: they cover what a row holds, neither more nor less, and pack without gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind, MediaSpan
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.prefix import BLOCK_TOKENS, PART_NAMES, PartLayout

FULL = LayerKind(q_heads=4, kv_heads=2, k_dim=8, v_dim=6)


def sliding(window, dtype="bfloat16"):
    return LayerKind(q_heads=4, kv_heads=1, k_dim=4, v_dim=8, window=window, dtype=dtype)


RECURRENT = LayerKind(state=((3, 5), (7,)), dtype="float32")


@st.composite
def layer_lists(draw):
    """Any pattern: full, sliding (smaller, equal, larger than the block), recurrent, borrowing."""
    layers = []
    for index in range(draw(st.integers(1, 6))):
        kinds = [
            FULL,
            RECURRENT,
            sliding(draw(st.sampled_from((1, 100, 128, 256, 257, 300, 512, 700, 1024)))),
        ]
        sources = [at for at in range(index) if layers[at].source is None and not layers[at].state]
        if sources:
            source = draw(st.sampled_from(sources))
            kinds.append(LayerKind(q_heads=4, source=source, window=layers[source].window))
        layers.append(draw(st.sampled_from(kinds)))
    return tuple(layers)


@st.composite
def prompts(draw):
    """The grid, and chunk ends as pictures leave them: anywhere, of any length."""
    grid = draw(st.sampled_from((256, 512, 1024)))
    spans, at = [], 0
    for number in range(draw(st.integers(0, 6))):
        start = at + draw(st.integers(0, 400))
        at = start + draw(st.integers(1, 900))
        spans.append(MediaSpan(start, at - start, number))
    length, cuts = at + draw(st.integers(1, 1500)), []
    while not cuts or cuts[-1] < length:
        cuts.append(chunk_end(cuts[-1] if cuts else 0, length, grid, tuple(spans)))
    return grid, cuts


@settings(deadline=None)
@given(prompts())
def test_blocks_cover_whole_chunks_and_none_lies_in_two(prompt):
    grid, cuts = prompt
    parts = PartLayout([FULL], grid).of(cuts)
    at = 0
    for block in parts.blocks:
        assert block.start == at
        assert 0 < block.end - block.start <= BLOCK_TOKENS
        assert block.chunk_start in [0, *cuts]
        assert block.chunk_end == next(cut for cut in cuts if cut > block.chunk_start)
        assert block.chunk_start <= block.start < block.end <= block.chunk_end
        at = block.end
    assert at <= cuts[-1] < at + BLOCK_TOKENS
    assert parts.boundaries == tuple(cuts[:-1])
    assert set(parts.boundaries) <= set(parts.lines) <= set(cuts)
    assert (cuts[-1] in parts.lines) == (cuts[-1] % grid == 0)
    for line in parts.lines:
        assert parts.is_line(line)
        assert parts.blocks[parts.count(line) - 1].end == line


def test_without_pictures_blocks_are_those_of_the_grid():
    for length in range(1, 3000, 97):
        cuts = [*range(512, length, 512), length]
        blocks = PartLayout([FULL], 512).of(cuts).blocks
        assert [(one.start, one.end) for one in blocks] == [
            (start, start + 256) for start in range(0, length - 255, 256)
        ]


@settings(deadline=None, max_examples=60)
@given(layer_lists(), prompts())
def test_pieces_lie_one_after_the_other(layers, prompt):
    parts = PartLayout(layers, prompt[0]).of(prompt[1])
    for block in range(len(parts.blocks)):
        for part in PART_NAMES:
            end = 0
            for piece in parts.pieces(block, part):
                assert piece.offset_bytes == end
                assert layers[piece.layer].source is None
                end += piece.size_bytes
            assert end == parts.part_bytes(block, part)


@settings(deadline=None, max_examples=60)
@given(layer_lists(), prompts())
def test_full_parts_are_exactly_what_the_layer_list_says_of_a_block(layers, prompt):
    parts = PartLayout(layers, prompt[0]).of(prompt[1])
    full = [layer for layer in layers if layer.window is None and not layer.state]
    for number, block in enumerate(parts.blocks):
        expected = sum(layer.bytes(block.end - block.start) for layer in full)
        assert parts.part_bytes(number, "full") == expected
        assert parts.needs_full(number) == bool(expected)


@settings(deadline=None, max_examples=60)
@given(layer_lists(), prompts())
def test_what_a_boundary_needs_holds_every_position_that_a_row_holds_there(layers, prompt):
    parts = PartLayout(layers, prompt[0]).of(prompt[1])
    for boundary in parts.lines:
        needed = [*parts.needs_at(boundary)]
        needed += [(block, "full") for block in range(parts.count(boundary)) if parts.needs_full(block)]
        held: dict = {}  # the run of positions that ends last
        for block, part in sorted(needed):
            assert parts.part_bytes(block, part) > 0
            for piece in parts.pieces(block, part):
                first = parts.blocks[block].start + piece.first_token
                run = held.get((piece.layer, piece.name), range(0))
                begin = run.start if first == run.stop else first
                held[piece.layer, piece.name] = range(begin, first + piece.tokens)
        for index, layer in enumerate(layers):
            for part in layer.parts:
                run = held[index, part.name]
                if part.extent != "constant":
                    assert run.start <= boundary - part.tokens_held(boundary) < run.stop == boundary


@settings(deadline=None, max_examples=60)
@given(layer_lists(), prompts())
def test_every_window_part_of_a_chunk_can_be_captured_from_rings_at_its_end(layers, prompt):
    parts = PartLayout(layers, prompt[0]).of(prompt[1])
    for number, block in enumerate(parts.blocks):
        for piece in parts.pieces(number, "window"):
            ring = range(block.chunk_end - layers[piece.layer].window, block.chunk_end)
            first = block.start + piece.first_token
            assert first in ring
            assert first + piece.tokens - 1 in ring
            assert first + piece.tokens == block.end


@pytest.mark.parametrize(("window", "blocks"), [(128, 1), (256, 1), (257, 2), (1024, 4)])
def test_a_window_needs_as_many_blocks_as_it_reaches_over(window, blocks):
    needed = PartLayout([FULL, sliding(window)], 256).of(range(256, 2049, 256)).needs_at(2048)
    assert needed == tuple((block, "window") for block in range(8 - blocks, 8))


def test_a_state_is_kept_at_chunk_ends_only():
    parts = PartLayout([RECURRENT], 512).of([512, 1024, 1100])
    assert [parts.part_bytes(block, "state") for block in range(4)] == [0, 88, 0, 88]
    assert parts.needs_at(1024) == ((3, "state"),)


def test_what_is_packed_by_the_table_is_unpacked_by_it():
    parts = PartLayout([FULL, sliding(300), RECURRENT, sliding(100, "float32")], 512).of([512, 700, 1024])
    random = np.random.default_rng(0)
    for block in range(len(parts.blocks)):
        for part in PART_NAMES:
            pieces = parts.pieces(block, part)
            arrays = [random.integers(0, 256, piece.size_bytes, dtype=np.uint8) for piece in pieces]
            packed = np.concatenate([*arrays, np.zeros(0, np.uint8)])
            assert packed.nbytes == parts.part_bytes(block, part)
            for piece, array in zip(pieces, arrays, strict=True):
                found = packed[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
                assert (found == array).all()


def test_a_part_has_a_dtype_if_its_pieces_agree():
    layout = PartLayout([FULL, sliding(300), sliding(100, "float32")], 256)
    assert layout.dtype("full") == "bfloat16"
    assert layout.dtype("window") is None
    assert layout.dtype("state") is None


@pytest.mark.parametrize("grid", [0, -256, 100, 300])
def test_a_grid_that_is_no_multiple_of_the_block_is_refused(grid):
    with pytest.raises(ValueError, match="multiple of 256"):
        PartLayout([FULL], grid)
