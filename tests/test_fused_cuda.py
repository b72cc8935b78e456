"""The kernels of ``darkbloom_core.fused``, run thread by thread on the host, beside float64 and MLX's own operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import pytest
from cuda_on_host import CudaOnHost

from darkbloom_core.fused import Term, normed_heads, residual_norms
from darkbloom_core.fused._residual import MOST_HIDDEN

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no CUDA"),
]

EPSILON = 1e-5
ROUNDING = 2**-8
"""Of a bfloat16, relative to the value; twice over, since norms look at a rounded sum."""


def array(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.bfloat16, mean: float = 0.0) -> mx.array:
    values = np.random.default_rng((seed, *shape)).normal(mean, size=shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def floats(found: mx.array) -> np.ndarray:
    return np.array(found.astype(mx.float32), np.float64)


def normed(values: np.ndarray, weight: mx.array | None) -> np.ndarray:
    scale = 1 / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON)
    return values * scale * (1 if weight is None else floats(weight))


def assert_near(found: mx.array, wanted: np.ndarray, *, roundings: int = 2) -> None:
    """MLX's own operations round each result: a turned pair's two sums may then cancel."""
    assert found.shape == wanted.shape
    slack = roundings * ROUNDING
    np.testing.assert_allclose(floats(found), wanted, rtol=slack, atol=2e-3 if roundings == 2 else 4 * slack)


@dataclass(frozen=True)
class Residual:
    hidden: int
    tokens: int = 3
    terms: tuple[bool, ...] = (False,)
    normed: bool = False
    scaled: bool = False
    norms: int = 0
    dtype: mx.Dtype = mx.bfloat16

    def __str__(self) -> str:
        flags = f"{'norm' if self.normed else ''}{'scale' if self.scaled else ''}"
        return (
            f"{self.tokens}x{self.hidden}-{''.join('nt'[not one] for one in self.terms)}-{flags}-{self.norms}"
        )

    @cached_property
    def x(self) -> mx.array:
        return array(1, self.tokens, self.hidden, seed=1, dtype=self.dtype)

    def weight(self, number: int) -> mx.array:
        return array(self.hidden, seed=10 + number, mean=1.0, dtype=self.dtype)

    @cached_property
    def given(self) -> list[Term]:
        weights = [self.weight(number) if one else None for number, one in enumerate(self.terms)]
        shape = (1, self.tokens, self.hidden)
        return [Term(array(*shape, seed=2 + n, dtype=self.dtype), w) for n, w in enumerate(weights)]

    @property
    def scalar(self) -> mx.array | None:
        return mx.array([0.5]).astype(self.dtype) if self.scaled else None

    def __call__(self, tokens: slice = slice(None)) -> tuple[mx.array, ...]:
        return residual_norms(
            self.x[:, tokens],
            [Term(term.value[:, tokens], term.weight) for term in self.given],
            weight=self.weight(5) if self.normed else None,
            scalar=self.scalar,
            norms=[self.weight(6 + number) for number in range(self.norms)],
            epsilon=EPSILON,
        )

    def wanted(self) -> list[np.ndarray]:
        terms = [(floats(term.value), term.weight) for term in self.given]
        found = floats(self.x)
        if terms:
            joined = sum(values if weight is None else normed(values, weight) for values, weight in terms)
            found = found + (normed(joined, self.weight(5)) if self.normed else joined)
            found = found * (0.5 if self.scaled else 1)
        return [found, *(normed(found, self.weight(6 + number)) for number in range(self.norms))]


@dataclass(frozen=True)
class Heads:
    size: int
    q_heads: int
    kv_heads: int
    rows: int = 2
    length: int = 3

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}x{self.size}-{self.q_heads}-{self.kv_heads}"

    @cached_property
    def offsets(self) -> mx.array:
        return mx.array([1000 * row + 7 for row in range(self.rows)], mx.int32)

    @cached_property
    def periods(self) -> mx.array:
        periods = 10_000.0 ** (np.arange(self.size // 2) / (self.size // 2))
        periods[self.size // 4 :] = np.inf
        return mx.array(periods.astype(np.float32))

    def part(self, heads: int, seed: int) -> mx.array:
        return array(self.rows, self.length, heads * self.size, seed=seed)

    def weight(self, number: int) -> mx.array:
        return array(self.size, seed=20 + number, mean=1.0)

    def __call__(self, rows: slice = slice(None)) -> tuple[mx.array, ...]:
        k, v = (self.part(self.kv_heads, seed)[rows] if self.kv_heads else None for seed in (2, 3))
        found = normed_heads(
            self.part(self.q_heads, 1)[rows], k, v, self.size, self.offsets[rows], self.periods,
            query_weight=self.weight(1), key_weight=self.weight(2) if self.kv_heads else None, epsilon=EPSILON,
        )  # fmt: skip
        assert (found[1] is None) == (found[2] is None) == (not self.kv_heads)
        return tuple(each for each in found if each is not None)

    def wanted(self) -> list[np.ndarray]:
        def split(heads: int, seed: int) -> np.ndarray:
            values = floats(self.part(heads, seed))
            return values.reshape(self.rows, self.length, heads, self.size).swapaxes(1, 2)

        found = [self._turned(normed(split(self.q_heads, 1), self.weight(1)))]
        if self.kv_heads:
            found.append(self._turned(normed(split(self.kv_heads, 2), self.weight(2))))
            found.append(normed(split(self.kv_heads, 3), None))
        return found

    def _turned(self, heads: np.ndarray) -> np.ndarray:
        positions = floats(self.offsets)[:, None] + np.arange(self.length)
        angles = positions[:, None, :, None] / floats(self.periods)
        one, other = np.split(heads, 2, axis=-1)
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cosine - other * sine, one * sine + other * cosine], axis=-1)


RESIDUALS = [
    Residual(256),
    Residual(320, norms=1),
    Residual(704, normed=True, norms=3),
    Residual(704, terms=(True, True), normed=True, scaled=True),
    Residual(96, terms=(False, True), scaled=True, norms=2),
    Residual(2880, tokens=2, terms=(True,), norms=1),
    Residual(320, normed=True, norms=1, dtype=mx.float32),
    Residual(704, terms=(), norms=1),
]
HEADS = [
    Heads(64, 2, 1),
    Heads(256, 4, 2, length=1),
    Heads(512, 2, 1),
    Heads(128, 3, 0),
    Heads(64, 8, 2, rows=5),
]
ALL: list[Residual | Heads] = [*RESIDUALS, Residual(320, terms=(), norms=1), *HEADS]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> CudaOnHost:
    host = CudaOnHost()
    for each in ALL:
        host.rehearse(each)
    host.compile(tmp_path_factory.mktemp("fused"))
    return host


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_kernel_computes_what_float64_does(host: CudaOnHost, case: Residual | Heads) -> None:
    with host:
        found = case()
    wanted = case.wanted()
    assert len(found) == len(wanted)
    for one, values in zip(found, wanted, strict=True):
        assert_near(one, values)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_without_cuda_it_is_the_same(case: Residual | Heads) -> None:
    for one, values in zip(case(), case.wanted(), strict=True):
        assert_near(one, values, roundings=4)


@pytest.mark.parametrize("case", [RESIDUALS[3], HEADS[0], HEADS[4]], ids=str)
def test_what_one_token_gets_does_not_depend_on_its_neighbours(
    host: CudaOnHost, case: Callable[..., tuple[mx.array, ...]]
) -> None:
    with host:
        together, alone = case(), case(slice(0, 1))
    for many, one in zip(together, alone, strict=True):
        first = many[:, :1] if isinstance(case, Residual) else many[:1]
        assert mx.array_equal(first.view(mx.uint16), one.view(mx.uint16))


def test_what_no_kernel_takes_goes_mlx_s_way(host: CudaOnHost) -> None:
    narrow = Heads(32, 2, 1)
    with host:
        found = narrow()
    for one, values in zip(found, narrow.wanted(), strict=True):
        assert_near(one, values, roundings=4)


def test_the_norm_of_a_sum_has_the_bits_of_the_sum_s_norm(host: CudaOnHost) -> None:
    """A slice of layers that begins with a norm gives what one that goes on from the layer before gives."""
    case = RESIDUALS[1]
    with host:
        joined, beside = case()
        joined_again, alone = residual_norms(joined, [], epsilon=EPSILON, norms=[case.weight(6)])
    assert joined_again is joined
    assert mx.array_equal(beside.view(mx.uint16), alone.view(mx.uint16))


@pytest.mark.parametrize("is_cuda", [True, False])
def test_what_does_not_belong_together_is_refused(host: CudaOnHost, is_cuda: bool) -> None:
    x, one, short = array(1, 2, 8), array(8), array(4)
    with host if is_cuda else nullcontext():
        for terms, given in [
            ([Term(x)] * 3, {}),
            ([Term(x)], {"norms": [one] * 4}),
            ([Term(x[:, :1])], {}),
            ([Term(x, short)], {}),
            ([Term(x)], {"weight": short}),
            ([Term(x)], {"norms": [short]}),
            ([Term(x)], {"scalar": one}),
            ([], {"weight": one}),
            ([], {"scalar": one[:1]}),
        ]:
            with pytest.raises(ValueError, match="terms"):
                residual_norms(x, terms, epsilon=EPSILON, **given)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_heads_that_do_not_belong_together_are_refused(host: CudaOnHost, is_cuda: bool) -> None:
    def ask(q: int, k: int, v: int, *, key_weight: bool = True) -> None:
        parts = (array(1, 2, width) if width else None for width in (q, k, v))
        weight = array(64)
        normed_heads(
            *parts, 64, mx.array([0], mx.int32), mx.ones((32,)), epsilon=EPSILON,
            query_weight=weight, key_weight=weight if key_weight else None,
        )  # fmt: skip

    with host if is_cuda else nullcontext():
        for q, k, v, key_weight in [
            (128, 64, 0, True),
            (128, 0, 64, True),
            (128, 0, 0, True),
            (128, 64, 64, False),
            (100, 64, 64, True),
            (128, 64, 128, True),
        ]:
            with pytest.raises(ValueError, match=r"keys|heads"):
                ask(q, k, v, key_weight=key_weight)


def test_other_dtypes_and_sizes_go_mlx_s_way(host: CudaOnHost) -> None:
    """Else it would be kernels that nobody rehearsed."""
    x, weight = array(1, 2, 8), mx.ones((8,))
    wide = array(1, 1, MOST_HIDDEN + 1)
    with host:
        residual_norms(x, [Term(x)], epsilon=EPSILON, norms=[weight])
        residual_norms(x, [Term(x.astype(mx.float32))], epsilon=EPSILON)
        residual_norms(wide, [Term(wide)], epsilon=EPSILON)
        for offsets, periods, weight in [
            (mx.array([0], mx.int64), mx.ones((32,)), array(64)),
            (mx.array([0], mx.int32), mx.ones((32,), mx.bfloat16), array(64)),
            (mx.array([0], mx.int32), mx.ones((32,)), mx.ones((64,))),
        ]:
            q = array(1, 1, 64)
            normed_heads(
                q, None, None, 64, offsets, periods, query_weight=weight, key_weight=None, epsilon=EPSILON
            )
