"""What the parts of blocks are: they cover what a row holds, neither more nor less, and pack without gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darkbloom_core.contracts import LayerKind
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


grids = st.sampled_from((256, 512, 1024))


@given(layer_lists(), grids, st.integers(0, 20))
def test_pieces_lie_one_after_the_other(layers, grid, block):
    layout = PartLayout(layers, grid)
    for part in PART_NAMES:
        end = 0
        for piece in layout.pieces(block, part):
            assert piece.offset_bytes == end
            assert layers[piece.layer].source is None
            end += piece.size_bytes
        assert end == layout.part_bytes(block, part)


@given(layer_lists(), grids)
def test_full_parts_are_exactly_what_the_layer_list_says_of_a_block(layers, grid):
    layout = PartLayout(layers, grid)
    full = sum(layer.bytes(BLOCK_TOKENS) for layer in layers if layer.window is None and not layer.state)
    assert all(layout.part_bytes(block, "full") == full for block in range(8))


@given(layer_lists(), grids, st.integers(1, 6))
def test_what_a_boundary_needs_holds_every_position_that_a_row_holds_there(layers, grid, chunks):
    layout, boundary = PartLayout(layers, grid), grid * chunks
    needed = [*layout.needs_at(boundary)]
    needed += [(block, "full") for block in range(boundary // BLOCK_TOKENS) if layout.needs_full(block)]
    held = {
        (piece.layer, piece.name, block * BLOCK_TOKENS + piece.first_token + token)
        for block, part in needed
        if part != "state"
        for piece in layout.pieces(block, part)
        for token in range(piece.tokens)
    }
    states = {
        (piece.layer, piece.name)
        for block, part in needed
        if part == "state"
        for piece in layout.pieces(block, part)
    }
    for index, layer in enumerate(layers):
        for part in layer.parts:
            if part.extent == "constant":
                assert (index, part.name) in states
                continue
            last = range(boundary - part.tokens_held(boundary), boundary)
            assert {(index, part.name, position) for position in last} <= held


@given(layer_lists(), grids, st.integers(1, 6))
def test_every_window_part_of_a_chunk_can_be_captured_from_rings_at_its_end(layers, grid, chunks):
    layout, boundary = PartLayout(layers, grid), grid * chunks
    for block in range((boundary - grid) // BLOCK_TOKENS, boundary // BLOCK_TOKENS):
        for piece in layout.pieces(block, "window"):
            ring = range(boundary - layers[piece.layer].window, boundary)
            first = block * BLOCK_TOKENS + piece.first_token
            assert first in ring
            assert first + piece.tokens - 1 in ring


@pytest.mark.parametrize(("window", "blocks"), [(128, 1), (256, 1), (257, 2), (1024, 4)])
def test_a_window_needs_as_many_blocks_as_it_reaches_over(window, blocks):
    needed = PartLayout([FULL, sliding(window)], 256).needs_at(2048)
    assert needed == tuple((block, "window") for block in range(8 - blocks, 8))


def test_a_state_is_kept_at_grid_lines_only():
    layout = PartLayout([RECURRENT], 512)
    assert [layout.part_bytes(block, "state") for block in range(4)] == [0, 88, 0, 88]
    assert layout.needs_at(1024) == ((3, "state"),)


def test_what_is_packed_by_the_table_is_unpacked_by_it():
    layout = PartLayout([FULL, sliding(300), RECURRENT, sliding(100, "float32")], 512)
    random = np.random.default_rng(0)
    for block in range(4):
        for part in PART_NAMES:
            pieces = layout.pieces(block, part)
            arrays = [random.integers(0, 256, piece.size_bytes, dtype=np.uint8) for piece in pieces]
            packed = np.concatenate([*arrays, np.zeros(0, np.uint8)])
            assert packed.nbytes == layout.part_bytes(block, part)
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
