"""Pictures through the engine: the tower in slices, spans in chunks, what is kept, and who is to blame."""

import mlx.core as mx
import numpy as np
import pytest
from scheduler_life import GRID
from toy_engine import GREEDY, engines, is_empty, request, start, wait_for
from toy_family import HIDDEN, ToyModel, ToySeam, full, text_of, tokens_of, toy_picture, window

from darkbloom_core.contracts import MediaSpan, Prompt
from darkbloom_core.engine import EngineOptions, GenerationRequest, PlainParser
from darkbloom_core.engine._admission import LONGEST_PICTURE, check_request, worst_case_bytes
from darkbloom_core.engine._pictures import PICTURES, PictureCache
from darkbloom_core.engine._scheduler import ChunkSlice, Scheduler, TowerSlice
from darkbloom_core.engine._sequence import Sequence
from darkbloom_core.errors import GenerationFailed, InvalidRequest
from darkbloom_core.memory import Ledger

LAYERS = [window(8, spans="window"), full(), window(16, spans="window"), window(8, source=0, spans="window")]
KEPT = 1 << 20


def pictures_of(*lengths):
    random = np.random.default_rng(sum(lengths))
    return tuple(toy_picture(random.random(length)) for length in lengths)


def prompt_of(parts, seed=0):
    """A prompt of (text tokens, picture or None) in turn, and its pictures."""
    random, ids, spans, pictures = np.random.default_rng(seed), [], [], []
    for text, picture in parts:
        ids += random.integers(1, 64, text).tolist()
        if picture is not None:
            spans.append(MediaSpan(len(ids), picture.soft_tokens, len(pictures)))
            pictures.append(picture)
            ids += [0] * picture.soft_tokens
    return Prompt(tuple(ids), tuple(spans)), tuple(pictures)


def ask(name, prompt, pictures, most=8, **more):
    return GenerationRequest(
        id=name,
        prompt=prompt,
        parser=PlainParser(),
        max_tokens=most,
        sampling=GREEDY,
        pictures=pictures,
        **more,
    )


def expected(model, prompt, pictures, most=8):
    return model.greedy(list(prompt.ids), most, prompt.spans, pictures)


ONE, TWO, THREE, LONG = pictures_of(4, 6, 9, 40)
CASES = {
    "one": [(5, ONE), (4, None)],
    "several": [(3, ONE), (2, TWO), (1, THREE), (9, None)],
    "across chunks": [(13, TWO), (6, THREE), (20, ONE), (3, None)],
    "touching": [(13, ONE), (0, TWO), (4, None)],
    "longer than a chunk": [(7, LONG), (5, None)],
    "first": [(0, ONE), (3, None)],
    "last": [(6, ONE)],
    "one token": [(9, pictures_of(1)[0])],
    "the same twice": [(2, ONE), (4, ONE), (5, None)],
}


@pytest.fixture
def engine():
    with engines() as begin:

        def make(**options):
            model = ToyModel(LAYERS, vision=ToySeam(fail_on=options.pop("fail_on", None)))
            return begin(model, picture_bytes=options.pop("picture_bytes", KEPT), **options), model

        yield make


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_whole_prompt_at_once(case, engine):
    one, model = engine()
    prompt, pictures = prompt_of(CASES[case])
    found = tokens_of(one.submit(ask("r", prompt, pictures)))
    if case == "touching":  # one picture to those that see both ways
        joined = toy_picture(np.concatenate([each.arrays["numbers"] for each in pictures]))
        whole = MediaSpan(prompt.spans[0].start, joined.soft_tokens, 0)
        seen = [model.vision.look(each) for each in pictures]
        model.vision.look = lambda _: np.concatenate([np.array(each) for each in seen])
        assert found == expected(model, Prompt(prompt.ids, (whole,)), (joined,))
    else:
        assert found == expected(model, prompt, pictures)
    assert is_empty(one)


def test_other_pictures_give_other_outputs_and_the_same_ones_the_same(engine):
    one, _ = engine()
    outputs = [
        text_of(one.submit(ask("r", *prompt_of([(5, each), (4, None)]))))
        for each in (ONE, pictures_of(5)[0], ONE)
    ]
    assert outputs[0] == outputs[2] != outputs[1]


def test_a_picture_that_was_seen_is_not_looked_at_again(engine):
    one, model = engine()
    model.vision.looks.clear()
    for _ in range(2):
        list(one.submit(ask("r", *prompt_of([(5, ONE), (4, ONE), (2, TWO), (3, None)]))))
    assert model.vision.looks.count("start") == 2


def test_without_room_pictures_are_looked_at_again_and_nothing_else_changes(engine):
    one, model = engine(picture_bytes=0)
    prompt, pictures = prompt_of([(5, ONE), (4, None)])
    model.vision.looks.clear()
    outputs = [tokens_of(one.submit(ask("r", prompt, pictures))) for _ in range(2)]
    assert model.vision.looks.count("start") == 2
    assert outputs == [expected(model, prompt, pictures)] * 2


def test_text_beside_pictures_gets_what_it_gets_alone(engine):
    one, model = engine(max_rows=8)
    texts = [np.random.default_rng(n).integers(1, 64, 30 + n).tolist() for n in range(3)]
    media = [prompt_of(CASES[case]) for case in ("several", "across chunks", "longer than a chunk")]
    asked = [request(f"t{n}", text, 25) for n, text in enumerate(texts)]
    asked += [ask(f"m{n}", *each, 25) for n, each in enumerate(media)]
    streams = [one.submit(each) for each in asked]
    found = [tokens_of(stream) for stream in streams]
    assert found == [model.greedy(text, 25) for text in texts] + [
        expected(model, *each, 25) for each in media
    ]
    assert one.status().largest_batch > 3


def test_a_picture_that_fails_ends_its_own_request_alone(engine):
    bad = toy_picture([0.5, 0.1, 0.2])
    one, model = engine(fail_on=0.5)
    text = np.random.default_rng(9).integers(1, 64, 40).tolist()
    beside = one.submit(request("text", text, 60))
    failing = one.submit(ask("bad", *prompt_of([(4, ONE), (3, bad), (4, None)])))
    good = one.submit(ask("good", *prompt_of([(5, TWO), (4, None)])))
    end = list(failing)[-1]
    assert end.reason == "error"
    assert isinstance(end.error, GenerationFailed)
    assert tokens_of(beside) == model.greedy(text, 60)
    assert tokens_of(good) == expected(model, *prompt_of([(5, TWO), (4, None)]))
    wait_for(lambda: is_empty(one))


def test_a_request_cancelled_before_its_pictures_are_seen_leaves_nothing(engine):
    one, model = engine(slice_seconds=1e-9)
    beside = one.submit(request("text", [3] * 20, 400))
    for number in range(10):
        one.submit(ask(f"r{number}", *prompt_of([(4, LONG), (3, THREE), (30, None)], number))).cancel()
    list(beside)
    wait_for(lambda: one.status().running == one.status().waiting == 0)
    assert tokens_of(one.submit(ask("r", *prompt_of(CASES["several"])))) == expected(
        model, *prompt_of(CASES["several"])
    )


@pytest.mark.parametrize(
    ("spans", "pictures", "reason"),
    [
        ((MediaSpan(2, 4, 0),), (), "missing"),
        ((MediaSpan(2, 4, 1),), (ONE,), "missing"),
        ((MediaSpan(2, 4, -1),), (ONE,), "missing"),
        ((MediaSpan(2, 3, 0),), (ONE,), "4 soft tokens, and 3 places"),
        ((MediaSpan(2, 0, 0),), (ONE,), "overlap"),
        ((MediaSpan(-1, 4, 0),), (ONE,), "overlap"),
        ((MediaSpan(8, 4, 0),), (ONE,), "overlap"),
        ((MediaSpan(4, 4, 0), MediaSpan(6, 4, 1)), (ONE, ONE), "overlap"),
        ((MediaSpan(6, 4, 0), MediaSpan(0, 4, 1)), (ONE, ONE), "overlap"),
        ((MediaSpan(0, 4, 0), MediaSpan(6, 4, 0)), (ONE,), "overlap"),
    ],
)
def test_spans_that_do_not_fit_are_the_requests_fault(spans, pictures, reason, engine):
    one, _ = engine()
    with pytest.raises(InvalidRequest, match=reason):
        one.submit(ask("r", Prompt((1,) * 10, spans), pictures))
    assert is_empty(one)


def test_a_picture_may_be_as_long_as_the_limit_and_no_longer():
    description = ToyModel(LAYERS, context_tokens=10_000).description
    for length in (LONGEST_PICTURE, LONGEST_PICTURE + 1):
        prompt, pictures = prompt_of([(5, toy_picture(np.zeros(length))), (4, None)])
        if length == LONGEST_PICTURE:
            check_request(ask("r", prompt, pictures), description, sees=True)
        else:
            with pytest.raises(InvalidRequest, match="4096 are allowed"):
                check_request(ask("r", prompt, pictures), description, sees=True)


def test_a_model_that_does_not_see_refuses_pictures():
    blind = start(ToyModel(LAYERS))
    try:
        with pytest.raises(InvalidRequest, match="does not accept images"):
            blind.submit(ask("r", *prompt_of(CASES["one"])))
    finally:
        blind.close()


def test_what_the_model_has_seen_is_part_of_a_requests_worst_case():
    description = ToyModel(LAYERS).description
    prompt, pictures = prompt_of(CASES["several"])
    plain = worst_case_bytes(ask("r", Prompt(prompt.ids), ()), description)
    assert worst_case_bytes(ask("r", prompt, pictures), description) == plain + (4 + 6 + 9) * HIDDEN * 4


# --- the scheduler --------------------------------------------------------------------------


def scheduled(scheduler, layers=4, tower_layers=1, steps=200):
    """Every slice that is planned until nothing is left."""
    found = []
    for _ in range(steps):
        plan = scheduler.plan(layers, tower_layers)
        if plan.prefill is None:
            return found
        found.append(plan.prefill)
        if isinstance(plan.prefill, ChunkSlice) and plan.prefill.last_layer == 4:
            for sequence in plan.prefill.sequences:
                sequence.prefilled = plan.prefill.end
    raise AssertionError("it does not end")


def decoding(scheduler):
    """A sequence that decodes for ever, so that slices are kept short."""
    running = Sequence("d", 1, 10**6)
    scheduler.add(running)
    scheduler.admit(lambda _: True)
    running.prefilled = 1


def test_the_tower_runs_in_slices_right_before_the_chunk_that_needs_it():
    scheduler = Scheduler(max_rows=4, layers=4, grid=GRID, tower_layers=3, picture_tokens=30)
    decoding(scheduler)
    spans = (MediaSpan(5, 10, 0), MediaSpan(50, 30, 1), MediaSpan(90, 4, 2))
    sequence = Sequence("s", 120, 5, 0, spans, unseen={0, 1, 2})
    scheduler.add(sequence)
    scheduler.admit(lambda _: True)
    found = [
        (each.picture, each.first_layer, each.last_layer)
        if isinstance(each, TowerSlice)
        else ("chunk", each.start, each.end)
        for each in scheduled(scheduler, tower_layers=2)
    ]
    assert found == [
        (0, 0, 3), ("chunk", 0, 50),
        (1, 0, 1), (1, 1, 3), ("chunk", 50, 80),
        (2, 0, 3), ("chunk", 80, 120),
    ]  # fmt: skip
    assert not sequence.unseen


def test_with_nobody_waiting_for_a_token_a_picture_runs_at_once():
    scheduler = Scheduler(max_rows=4, layers=4, grid=GRID, tower_layers=27)
    scheduler.add(Sequence("s", 20, 5, 0, (MediaSpan(5, 10, 0),), unseen={0}))
    scheduler.admit(lambda _: True)
    first, second = scheduled(scheduler)
    assert (first.first_layer, first.last_layer) == (0, 27)
    assert (second.start, second.end) == (0, 20)


def test_pictures_that_were_seen_or_reused_need_no_tower():
    scheduler = Scheduler(max_rows=4, layers=4, grid=GRID, tower_layers=3)
    spans = (MediaSpan(5, 10, 0), MediaSpan(70, 20, 1), MediaSpan(100, 5, 2))
    sequence = Sequence("s", 120, 5, 0, spans, unseen={0, 2}, prefilled=64)
    scheduler.add(sequence)
    scheduler.admit(lambda _: True)
    assert [isinstance(each, TowerSlice) and each.picture for each in scheduled(scheduler)] == [2, False]


def test_of_longer_pictures_fewer_layers_run_at_a_time_and_never_less_than_one():
    """The numbers of layers are for a chunk of the grid's size, and for the largest picture."""
    scheduler = Scheduler(max_rows=4, layers=8, grid=GRID, tower_layers=8, picture_tokens=4 * GRID)
    decoding(scheduler)
    spans, places = [], 0
    for number, length in enumerate((4 * GRID, GRID, 1, 32 * GRID)):
        spans.append(MediaSpan(places + 3, length, number))
        places += length + 3
    sequence = Sequence("s", places + 5, 5, 0, tuple(spans), unseen={0, 1, 2, 3})
    scheduler.add(sequence)
    scheduler.admit(lambda _: True)
    towers, chunks = {}, {}
    for _ in range(100):
        piece = scheduler.plan(4, 2).prefill
        if piece is None:
            break
        layers = piece.last_layer - piece.first_layer
        if isinstance(piece, TowerSlice):
            towers.setdefault(spans[piece.picture].length, layers)
        else:
            chunks.setdefault(piece.end - piece.start, layers)
            if piece.last_layer == 8:
                sequence.prefilled = piece.end
    assert towers == {4 * GRID: 1, GRID: 7, 1: 7, 32 * GRID: 0}, (
        "what comes before the first layer counts as one"
    )
    assert chunks[4 * GRID] == 1
    assert chunks[32 * GRID] == 1
    assert all(layers == 4 for length, layers in chunks.items() if length <= GRID)


def test_a_sequence_that_ends_takes_its_tower_with_it():
    scheduler = Scheduler(max_rows=4, layers=4, grid=GRID, tower_layers=3)
    decoding(scheduler)
    gone, other = (Sequence(name, 30, 5, 0, (MediaSpan(5, 10, 0),), unseen={0}) for name in "ab")
    for sequence in (gone, other):
        scheduler.add(sequence)
    scheduler.admit(lambda _: True)
    assert scheduler.plan(4, 1).prefill.sequence is gone
    scheduler.remove(gone)
    following = scheduler.plan(4, 1).prefill
    assert (following.sequence, following.first_layer) == (other, 0)


# --- the cache ------------------------------------------------------------------------------


def cache(limit, most):
    share = Ledger().share("toy", limit)
    return PictureCache(share, most), share


def test_not_more_pictures_are_kept_than_there_may_be(monkeypatch):
    monkeypatch.setattr("darkbloom_core.engine._pictures.MOST_PICTURES", 2)
    cache = PictureCache(Ledger().share("toy", KEPT), KEPT)
    for number in range(4):
        cache.put(bytes([number]), mx.zeros((1, HIDDEN)))
    assert cache.count == 2
    assert [cache.get(bytes([number])) is not None for number in range(4)] == [False, False, True, True]


def seen(tokens):
    import mlx.core as mx

    return mx.zeros((tokens, 8))  # 32 bytes each


def test_what_is_kept_is_reserved_and_bounded_and_the_oldest_goes_first():
    pictures, share = cache(10_000, 320)
    for name in (b"a", b"b", b"c"):
        pictures.put(name, seen(3))
    assert pictures.get(b"a") is not None
    pictures.put(b"d", seen(3))
    assert [name for name in (b"a", b"b", b"c", b"d") if pictures.get(name) is not None] == [b"a", b"c", b"d"]
    assert share.reservations()[PICTURES] == pictures.bytes_used == 288
    pictures.put(b"e", seen(11))
    assert pictures.get(b"e") is None
    pictures.close()
    assert PICTURES not in share.reservations()
    pictures.put(b"f", seen(1))
    assert pictures.bytes_used == 0


def test_it_takes_no_more_than_the_share_leaves_and_gives_way():
    pictures, share = cache(300, 1000)
    assert share.reserve("request", 100)
    for name in (b"a", b"b", b"c"):
        pictures.put(name, seen(3))
    assert pictures.bytes_used == 192
    share.resize(250)
    pictures.fit()
    assert pictures.bytes_used == 96
    assert pictures.trim(1) == 96
    assert share.reserve("other", 150)
    pictures.put(b"d", seen(3))
    assert pictures.bytes_used == 0


def test_kept_pictures_never_keep_a_request_out():
    """The grant is full of pictures: a request that needs all of it evicts them and runs."""
    model = ToyModel([full()], vision=ToySeam())
    probe = start(model, grant=1 << 22)
    slabs = probe.slab_bytes
    probe.close()
    big = request("big", [1] * 300, 700)
    room = worst_case_bytes(big, model.description)
    one = start(model, grant=slabs + room, picture_bytes=room, max_rows=8)
    try:
        if one.slab_bytes != slabs:  # a smaller grant has smaller slabs
            one.resize(one.slab_bytes + room)
        for number in range(40):
            list(one.submit(ask("r", *prompt_of([(2, toy_picture([number] * 12)), (3, None)]), 2)))
        assert one.cache_bytes > 0
        assert list(one.submit(big))[-1].reason == "length"
    finally:
        one.close()


def test_options_say_how_much_is_kept():
    assert EngineOptions().picture_bytes == 0
