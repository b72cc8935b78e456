"""The scheduler is pure: whole lives of many sequences are played without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_life import longest_wait, play

from darkbloom_core.contracts import MediaSpan
from darkbloom_core.engine._scheduler import (
    LEAST_PART_TOKENS,
    PART_KEYS,
    PART_WORK,
    PRIORITY_ARRIVALS,
    ChunkSlice,
    Scheduler,
    chunk_end,
    chunk_parts,
)
from darkbloom_core.engine._sequence import Sequence


@given(prompt=st.integers(1, 5000), grid=st.sampled_from([16, 256, 512]))
def test_chunks_cover_the_prompt_on_the_grid(prompt, grid):
    start, starts = 0, []
    while start < prompt:
        starts.append(start)
        start = chunk_end(start, prompt, grid)
    assert start == prompt
    assert all(one % grid == 0 for one in starts)


def test_a_chunk_never_splits_a_span():
    span = (MediaSpan(4, 6, 0),)
    assert chunk_end(0, 100, 8, span) == 4
    assert chunk_end(4, 100, 8, (MediaSpan(4, 20, 0),)) == 24
    assert chunk_end(0, 100, 16, span) == 16


def _sequence(name: str, prompt: int = 10, most: int = 5, priority: int = 0) -> Sequence:
    return Sequence(name, prompt, most, priority)


def _always(_: Sequence) -> bool:
    return True


def test_the_earlier_of_two_equals_goes_first_and_priority_goes_before_both():
    scheduler = Scheduler(max_rows=1, layers=4, grid=16)
    for name, priority in (("first", 0), ("second", 0), ("urgent", 3)):
        scheduler.add(_sequence(name, priority=priority))
    order = []
    while scheduler.waiting:
        (admitted,) = scheduler.admit(_always)
        order.append(admitted.id)
        scheduler.remove(admitted)
    assert order == ["urgent", "first", "second"]


def test_a_large_sequence_at_the_head_is_not_overtaken_by_small_ones():
    scheduler = Scheduler(max_rows=8, layers=4, grid=16)
    scheduler.add(_sequence("large", prompt=1000))
    scheduler.add(_sequence("small"))
    assert scheduler.admit(lambda sequence: sequence.prompt_tokens < 100) == ()
    assert [one.id for one in scheduler.admit(_always)] == ["large", "small"]


def test_a_priority_is_a_bounded_head_start_so_later_urgent_ones_do_not_starve_a_patient_one():
    scheduler = Scheduler(max_rows=1, layers=4, grid=16)
    scheduler.add(_sequence("patient", priority=0))
    for number in range(2 * PRIORITY_ARRIVALS):
        scheduler.add(_sequence(f"urgent {number}", priority=1))
    order = []
    while scheduler.waiting:
        (admitted,) = scheduler.admit(_always)
        order.append(admitted.id)
        scheduler.remove(admitted)
    assert order.index("patient") == PRIORITY_ARRIVALS - 1


def test_a_chunk_runs_whole_when_nobody_decodes_and_in_slices_when_somebody_does():
    scheduler = Scheduler(max_rows=2, layers=10, grid=16)
    decoding, arriving = _sequence("decoding", 4, 9), _sequence("arriving", 40, 9)
    scheduler.add(decoding)
    scheduler.admit(_always)
    alone = scheduler.plan(3).prefill
    assert alone is not None
    assert (alone.first_layer, alone.last_layer) == (0, 10)
    decoding.prefilled, decoding.launched = 4, 1
    scheduler.add(arriving)
    scheduler.admit(_always)
    pieces = []
    for _ in range(4):
        plan = scheduler.plan(3)
        assert plan.decode == (decoding,)
        assert plan.prefill is not None
        pieces.append(
            (plan.prefill.start, plan.prefill.end, plan.prefill.first_layer, plan.prefill.last_layer)
        )
    assert pieces == [(0, 16, 0, 3), (0, 16, 3, 6), (0, 16, 6, 9), (0, 16, 9, 10)]


# --- parts of a chunk -------------------------------------------------------------------------


@given(start=st.integers(0, 200_000), tokens=st.integers(1, 512))
def test_parts_cover_a_chunk_and_are_as_many_as_its_place_says(start, tokens):
    end = start + tokens
    parts = chunk_parts(start, end, on_cpu=True)
    assert chunk_parts(start, end, on_cpu=False) == 1
    assert parts == 1 or end > PART_KEYS
    bounds = ChunkSlice((), start, end, 0, 0, parts).part_bounds
    assert [place for bound in bounds for place in range(*bound)] == list(range(start, end))
    lengths = [last - first for first, last in bounds]
    assert max(lengths) - min(lengths) <= 1
    if parts > 1:
        assert min(lengths) >= LEAST_PART_TOKENS
        assert 2 * tokens * end > parts * PART_WORK
    if end > PART_KEYS and tokens >= 2 * parts * LEAST_PART_TOKENS:
        assert tokens * end <= parts * PART_WORK


def test_a_chunk_of_256_tokens_has_twice_as_many_parts_behind_twice_as_many_keys():
    ends = [256, 512, 768, 1024, 1280, 2048, 2304, 4096, 4352, 100_096]
    assert [chunk_parts(end - 256, end, on_cpu=True) for end in ends] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]


def _beside_one_that_decodes(prompt: int, layers: int, *, on_cpu: bool = True, **more):
    scheduler = Scheduler(max_rows=2, layers=layers, grid=256, on_cpu=on_cpu)
    decoding, deep = _sequence("decoding", 4, 99), Sequence("deep", prompt, 9, **more)
    decoding.prefilled, decoding.launched = 4, 1
    deep.prefilled = prompt - 256
    running(scheduler, decoding, deep)
    return scheduler, decoding, deep


def test_of_a_chunk_in_parts_at_most_what_fits_into_a_slice_runs_between_two_decode_steps():
    """Layer 1 is three times as slow as the others, and of layer 3 one part does not fit at all."""
    scheduler, decoding, _ = _beside_one_that_decodes(2048, 4)
    planned, units = [], []

    def share(layer: int, tokens: int, keys: int) -> float:
        assert (tokens, keys) == (64, 2048)
        return [0.25, 0.75, 0.25, 3.0][layer]

    for _ in range(10):
        plan = scheduler.plan(99, 99, share)
        assert plan.decode == (decoding,)
        pieces = list(plan.prefill.pieces())
        planned.append(len(pieces))
        for piece in pieces:
            (first, last) = piece.part_bounds[piece.first_part]
            units.append((piece.first_layer, first, last))
            assert len(list(piece.pieces())) == 1
    assert planned == [4, 1, 1, 1, 2, 3, 1, 1, 1, 1]
    starts = range(1792, 2048, 64)
    assert units == [(layer, start, start + 64) for layer in range(4) for start in starts]
    assert scheduler._chunk is None


def test_a_part_that_was_never_timed_runs_alone_and_without_decoding_all_of_the_chunk_runs():
    scheduler, decoding, deep = _beside_one_that_decodes(2048, 3)
    first, second = scheduler.plan(9).prefill, scheduler.plan(9).prefill
    assert [len(list(one.pieces())) for one in (first, second)] == [1, 1]
    scheduler.remove(decoding)
    rest = scheduler.plan(9).prefill
    assert (rest.first_layer, rest.first_part, rest.last_layer, rest.last_part) == (0, 2, 3, 0)
    assert len(list(rest.pieces())) == 10
    assert rest.sequences == (deep,)


def test_a_chunk_with_a_picture_in_it_and_every_chunk_of_an_accelerator_has_one_part():
    for on_cpu, spans in ((True, (MediaSpan(1900, 4, 0),)), (False, ())):
        scheduler, *_ = _beside_one_that_decodes(2048, 4, on_cpu=on_cpu, spans=spans)
        piece = scheduler.plan(3).prefill
        assert (piece.parts, piece.first_layer, piece.last_layer) == (1, 0, 3)
        assert list(piece.pieces()) == [piece]
    scheduler, *_ = _beside_one_that_decodes(2048, 4, spans=(MediaSpan(30, 4, 0),))
    assert scheduler.plan(3).prefill.parts == 4


def test_removing_a_sequence_in_the_middle_of_its_chunk_forgets_the_chunk():
    scheduler = Scheduler(max_rows=2, layers=10, grid=16)
    gone, decoding, other = _sequence("gone", 40), _sequence("decoding", 4, 99), _sequence("other", 20)
    for sequence in (gone, decoding, other):
        scheduler.add(sequence)
    decoding.prefilled, decoding.launched = 4, 1
    scheduler.admit(_always)
    assert scheduler.plan(3).prefill.sequences == (gone,)
    scheduler.remove(gone)
    scheduler.admit(_always)
    piece = scheduler.plan(3).prefill
    assert (piece.sequences, piece.first_layer) == ((other,), 0)


def test_paused_rows_keep_their_place_and_are_not_stepped():
    scheduler = Scheduler(max_rows=2, layers=2, grid=16)
    paused, other = _sequence("paused"), _sequence("other")
    for sequence in (paused, other):
        scheduler.add(sequence)
    scheduler.admit(_always)
    for sequence in (paused, other):
        sequence.prefilled, sequence.launched = 10, 1
    paused.paused = True
    assert scheduler.plan(2).decode == (other,)
    assert paused in scheduler.running


def running(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    assert len(scheduler.admit(_always)) == len(sequences)


def test_short_prompts_are_packed_up_to_a_size_and_longer_ones_are_not():
    scheduler = Scheduler(max_rows=8, layers=4, grid=16, pack_tokens=32)
    short = [_sequence(str(n), prompt) for n, prompt in enumerate((5, 8, 3, 9))]
    running(scheduler, *short, _sequence("long", 16))
    piece = scheduler.plan(4).prefill
    assert piece.sequences == tuple(short[:3])
    assert (piece.start, piece.end) == (0, 8)
    for sequence in short[:3]:
        sequence.prefilled = sequence.prompt_tokens
    assert scheduler.plan(4).prefill.sequences == (short[3],)


def test_a_picture_or_a_second_chunk_is_never_packed():
    scheduler = Scheduler(max_rows=8, layers=4, grid=16, pack_tokens=32)
    seen, later = _sequence("seen", 5), _sequence("later", 20)
    seen.spans, later.prefilled = (MediaSpan(0, 4, 0),), 16
    running(scheduler, seen, later, _sequence("short", 4))
    assert scheduler.plan(4).prefill.sequences == (seen,)


def test_a_member_that_leaves_a_pack_leaves_the_others_in_it():
    scheduler = Scheduler(max_rows=8, layers=4, grid=16, pack_tokens=32)
    decoding = _sequence("decoding", 4, 99)
    decoding.prefilled, decoding.launched = 4, 1
    gone, stays = _sequence("gone", 5), _sequence("stays", 6)
    running(scheduler, decoding, gone, stays)
    assert scheduler.plan(2).prefill.sequences == (gone, stays)
    scheduler.remove(gone)
    piece = scheduler.plan(2).prefill
    assert (piece.sequences, piece.first_layer) == ((stays,), 2)


@pytest.mark.parametrize("packed", [False, True])
def test_every_sequence_of_a_random_life_ends_exactly_once_and_none_starves(packed):
    life = play(12_000, seed=1, packed=packed)
    assert set(life.ends.values()) == {1}
    assert life.arrived == len(life.ends) > 300
    assert life.reserved_bytes == 0
    assert life.longest_wait <= longest_wait()
    assert (life.largest_pack > 1) == packed
