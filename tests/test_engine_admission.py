"""Admission to the byte: what a request reserves, what still fits, and what a change of the limit does under load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import request
from toy_family import describe, full, recurrent, window

from darkbloom_core.contracts import MediaSpan
from darkbloom_core.engine import KvStore, lane_bytes, row_bytes
from darkbloom_core.engine._admission import worst_case_bytes
from darkbloom_core.engine._kv import GROWTH_TOKENS
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.memory import Ledger

TOKEN_BYTES = 32
LAYER = full(kv_heads=1, k_dim=4, v_dim=4)  # 2 x 4 numbers of 4 bytes: 32 bytes a token
BLOCK_BYTES = GROWTH_TOKENS * TOKEN_BYTES


def worst_case(prompt: int, most: int) -> int:
    return worst_case_bytes(request("a", [1] * prompt, most), describe([LAYER]))


def test_a_request_reserves_its_prompt_and_all_that_it_may_produce_in_whole_blocks():
    assert worst_case(1, 1) == BLOCK_BYTES == 8192
    assert worst_case(200, 56) == BLOCK_BYTES
    assert worst_case(200, 57) == 2 * BLOCK_BYTES
    assert worst_case(1000, 24) == 4 * BLOCK_BYTES


def test_the_last_token_that_fits_is_admitted_and_the_next_is_not():
    share = Ledger().share("toy", 3 * BLOCK_BYTES)
    assert share.reserve("fits", worst_case(700, 68))
    share.release("fits")
    assert not share.reserve("one more", worst_case(700, 69))
    assert share.reserved_bytes == 0


def test_a_limit_that_shrinks_under_load_takes_nobody_new_until_use_is_below_it_and_a_larger_one_does_at_once():
    share = Ledger().share("toy", 3 * BLOCK_BYTES)
    assert share.reserve("a", BLOCK_BYTES)
    assert share.reserve("b", BLOCK_BYTES)
    share.resize(BLOCK_BYTES)
    assert share.reserved_bytes == 2 * BLOCK_BYTES
    share.release("a")
    assert not share.reserve("c", BLOCK_BYTES)
    share.release("b")
    assert share.reserve("c", BLOCK_BYTES)
    share.resize(2 * BLOCK_BYTES)
    assert share.reserve("d", BLOCK_BYTES)


@given(
    layers=st.lists(
        st.sampled_from([full(), window(8), window(300), recurrent(), full(kv_heads=4, k_dim=16)]),
        min_size=1,
        max_size=6,
    ),
    tokens=st.integers(1, 3000),
)
def test_what_is_reserved_is_never_less_than_what_the_layers_hold(layers, tokens):
    held = sum(kind.bytes(tokens) for kind in layers)
    assert row_bytes(layers, tokens) + lane_bytes(layers) >= held
    rounding = sum(kind.bytes_per_token for kind in layers) * GROWTH_TOKENS
    assert row_bytes(layers, tokens) < sum(kind.bytes_per_token for kind in layers) * tokens + max(
        1, rounding
    )


@given(
    layers=st.lists(
        st.sampled_from([full(), window(8), window(300), recurrent(), full(kv_heads=4, k_dim=16)]),
        min_size=1,
        max_size=6,
    )
)
def test_admission_and_description_have_one_rate_and_it_is_the_slope_beyond_every_window(layers):
    description, blocks = describe(layers), 4 * GROWTH_TOKENS
    rate = description.kv_bytes_per_token
    assert row_bytes(layers, 1024 + blocks) - row_bytes(layers, 1024) == rate * blocks
    assert description.kv_bytes(1024 + 100) - description.kv_bytes(1024) == rate * 100


def test_what_a_row_allocates_grows_by_the_described_rate():
    layers = [window(8), full(), full(source=1), full(kv_heads=1), window(300)]
    store = KvStore(layers, 1)
    row = store.open_row(1, 2048)
    allocated = []
    for held in (1024, 2048):
        store.make_room(row, held)
        allocated.append(store.allocated_bytes)
    assert allocated[1] - allocated[0] == 1024 * describe(layers).kv_bytes_per_token


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1000])
def test_a_row_never_allocates_more_than_it_reserved(tokens):
    layers = [window(8), full(), full(source=1), full(kv_heads=1)]
    store = KvStore(layers, 1)
    row = store.open_row(1, tokens)
    for held in range(1, tokens + 1, 7):
        store.make_room(row, held)
        assert store.allocated_bytes - store.slab_bytes <= row_bytes(layers, tokens)


@pytest.mark.parametrize(
    ("prompt", "grid", "ends"),
    [(1000, 256, [256, 512, 768, 1000]), (1000, 512, [512, 1000]), (256, 256, [256]), (257, 256, [256, 257])],
)
def test_a_prompt_is_cut_on_the_grid(prompt, grid, ends):
    cuts = [0]
    while cuts[-1] < prompt:
        cuts.append(chunk_end(cuts[-1], prompt, grid))
    assert cuts[1:] == ends


@pytest.mark.parametrize(
    ("start", "grid", "end"),
    [(0, 8, 4), (4, 8, 10), (0, 4, 4), (0, 16, 16), (8, 8, 16)],
    ids=["cut before it", "starts at it", "ends where it starts", "inside a chunk", "begun already"],
)
def test_a_chunk_beside_a_picture_of_tokens_4_to_9(start, grid, end):
    assert chunk_end(start, 100, grid, (MediaSpan(4, 6, 0),)) == end
