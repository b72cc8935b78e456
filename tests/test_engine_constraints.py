"""Rows whose tokens are constrained: only what is allowed is chosen, and nobody else notices."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from toy_engine import LAYERS, is_empty, request, start, wait_for
from toy_family import VOCABULARY, ToyModel, tokens_of

from darkbloom_core.engine import OutputEnd, SamplingParams
from darkbloom_core.engine._sampling import SampledRow, Sampler, token_mask
from darkbloom_core.errors import GenerationFailed, InvalidRequest


class Only:
    """At each step only the tokens of one set, the sets in turn; ``length`` tokens in all."""

    def __init__(self, *sets, length=None, free_from=None):
        self.sets, self.length, self.free_from = sets, length, free_from
        self.taken = []

    @property
    def complete(self):
        return len(self.taken) == self.length

    def allowed(self):
        if self.free_from is not None and len(self.taken) >= self.free_from:
            return None
        bits = np.zeros(VOCABULARY, bool)
        bits[list(self.sets[len(self.taken) % len(self.sets)])] = True
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token):
        allowed = self.allowed()
        assert allowed is None or allowed[token // 8] >> token % 8 & 1
        self.taken.append(token)


def collect(stream):
    events = list(stream)
    assert isinstance(events[-1], OutputEnd)
    return tokens_of(events), events[-1]


EVEN, ODD = range(0, VOCABULARY, 2), range(1, VOCABULARY, 2)


@pytest.fixture(params=[False, True], ids=["one after another", "chained"])
def engine(request):
    engine = start(ToyModel(LAYERS), chained=request.param, max_rows=4)
    yield engine
    engine.close()


def test_only_allowed_tokens_are_chosen_and_they_are_the_likeliest_of_them(engine):
    constraint = Only(EVEN, ODD, [7])
    tokens, end = collect(engine.submit(request("a", [1, 2, 3], 12, constraint=constraint)))
    assert tokens == constraint.taken
    assert [token % 2 for token in tokens[:2]] == [0, 1]
    assert tokens[2::3] == [7] * 4
    assert end.reason == "length"
    model, seen = ToyModel(LAYERS), [1, 2, 3]
    for step, token in enumerate(tokens):
        allowed = list(constraint.sets[step % 3])
        logits = model.oracle(seen)[-1]
        assert token == allowed[int(logits[allowed].argmax())]
        seen.append(token)


def test_neighbours_of_a_constrained_row_get_what_they_get_alone(engine):
    """Rows join, end and leave while others are constrained; each constraint stays with its own row."""
    prompts = [[n + 1, n + 2, n + 3, *range(n)] for n in range(8)]
    alone = [collect(engine.submit(request(f"alone{n}", ids, 8 + n)))[0] for n, ids in enumerate(prompts)]
    constraints = {n: Only(EVEN if n % 4 else ODD) for n in range(0, 8, 2)}
    lonely = {
        n: collect(
            engine.submit(request(f"own{n}", prompts[n], 8 + n, constraint=Only(*constraints[n].sets)))
        )[0]
        for n in constraints
    }
    streams = [
        engine.submit(request(f"{n}", ids, 8 + n, constraint=constraints.get(n)))
        for n, ids in enumerate(prompts)
    ]
    gone = engine.submit(request("gone", [5, 6], 50, constraint=Only([9])))
    gone.cancel()
    together = [collect(stream)[0] for stream in streams]
    assert together == [lonely.get(n, tokens) for n, tokens in enumerate(alone)]
    list(gone)
    wait_for(lambda: is_empty(engine))


def test_rows_that_end_by_themselves_while_others_join_harm_nobody(engine):
    """A row's end is known when a step has been launched with it; constrained rows choose only after that."""
    alone = {
        n: collect(engine.submit(request(f"own{n}", [n, 2], 50, constraint=Only(EVEN, length=n))))[0]
        for n in range(1, 6)
    }
    streams = [
        (
            n % 5 + 1,
            engine.submit(request(f"{n}", [n % 5 + 1, 2], 50, constraint=Only(EVEN, length=n % 5 + 1))),
        )
        for n in range(40)
    ]
    for length, stream in streams:
        tokens, end = collect(stream)
        assert (tokens, end.reason) == (alone[length], "stop")
    wait_for(lambda: is_empty(engine))


def test_an_output_ends_when_its_constraint_is_complete(engine):
    tokens, end = collect(engine.submit(request("a", [1, 2], 50, constraint=Only(EVEN, length=5))))
    assert (len(tokens), end.reason, end.usage.completion_tokens) == (5, "stop", 5)
    tokens, end = collect(engine.submit(request("b", [1, 2], 50, constraint=Only([3], length=1))))
    assert (tokens, end.reason) == ([3], "stop")


def test_a_constraint_may_let_go(engine):
    constraint = Only([5], free_from=3)
    tokens, _ = collect(engine.submit(request("a", [1, 2], 8, constraint=constraint)))
    assert tokens[:3] == [5, 5, 5]
    assert tokens[3:] == ToyModel(LAYERS).greedy([1, 2, 5, 5, 5], 5)


class Breaks(Only):
    """Its ``where`` raises ``fault`` at the third token."""

    def __init__(self, where, fault):
        super().__init__(EVEN)
        self.where, self.fault = where, fault

    def allowed(self):
        self._check("allowed")
        return super().allowed()

    def accept(self, token):
        self._check("accept")
        super().accept(token)

    def _check(self, where):
        if where == self.where and len(self.taken) == 2:
            raise self.fault


@pytest.mark.parametrize("where", ["allowed", "accept"])
@pytest.mark.parametrize(
    "fault", [InvalidRequest("too complex"), ValueError("a secret")], ids=["ours", "other"]
)
def test_a_constraint_that_raises_ends_its_own_row_alone(engine, where, fault):
    expected = ToyModel(LAYERS).greedy([4, 5], 15)
    good = engine.submit(request("good", [4, 5], 15))
    bad = engine.submit(request("bad", [1, 2], 15, constraint=Breaks(where, fault)))
    _, end = collect(bad)
    assert end.reason == "error"
    if isinstance(fault, InvalidRequest):
        assert end.error is fault
    else:
        assert isinstance(end.error, GenerationFailed)
        assert "secret" not in end.error.message
    assert collect(good)[0] == expected
    wait_for(lambda: is_empty(engine))


class BreaksAtOnce(Only):
    def allowed(self):
        raise InvalidRequest("nothing fits")


def test_a_constraint_that_raises_before_the_first_token_ends_its_row(engine):
    tokens, end = collect(engine.submit(request("a", [1, 2], 5, constraint=BreaksAtOnce(EVEN))))
    assert (tokens, end.error.message) == ([], "nothing fits")
    assert collect(engine.submit(request("b", [1, 2], 5)))[0] == ToyModel(LAYERS).greedy([1, 2], 5)
    wait_for(lambda: is_empty(engine))


PARAMETERS = [
    SamplingParams(temperature=0, logit_bias={8: 1000.0}),
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=1.5, top_p=0.3, seed=3),
    SamplingParams(temperature=1.5, top_k=2, min_p=0.5, repetition_penalty=1.9, seed=3),
    SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, logprobs=3),
]


@pytest.mark.parametrize("sampling", PARAMETERS, ids=range(5))
def test_no_parameter_chooses_what_is_not_allowed(engine, sampling):
    tokens, end = collect(engine.submit(request("a", [1, 2], 30, sampling, constraint=Only([3, 5, 7]))))
    assert end.reason == "length"
    assert len(tokens) == 30
    assert set(tokens) <= {3, 5, 7}


def test_rows_without_a_constraint_need_no_mask():
    assert token_mask([None, None], 64) is None


def test_a_mask_may_be_shorter_or_longer_than_the_vocabulary():
    mask = token_mask([b"\x01", None, b"\xff" * 9], 12)
    assert mask.tolist() == [[True] + [False] * 11, [True] * 12, [True] * 12]


def test_every_token_that_is_allowed_can_be_chosen():
    """At each draw of a uniform number, near 0 and 1 too."""
    logits = mx.zeros((1, 16))
    for first, second in itertools.combinations(range(16), 2):
        bits = np.packbits(np.isin(np.arange(16), [first, second]), bitorder="little").tobytes()
        row = SampledRow(SamplingParams(temperature=1.0), 7, 0, (1,), [])
        sampler = Sampler([row], 16, None)
        chosen = {sampler.sample(logits, [step], token_mask([bits], 16))[0].item() for step in range(12)}
        assert chosen == {first, second}
