"""The CUDA kernels of the experts, run thread by thread on the host: what they compute, not how fast.

Inputs are small whole numbers where results must be exact, so that no order of summing matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from cuda_on_host import CudaOnHost
from mlx_lm.models.switch_layers import SwitchGLU

from darkbloom_core.engine._warmup import batch_sizes
from darkbloom_core.experts import _mxfp4_cuda, choose_experts, gated_experts, mix
from darkbloom_core.experts._mxfp4_cuda import ExpertLists, mxfp4_product

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no CUDA"),
]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([E2M1, -E2M1])


def unpacked(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """As the format says, in float64: ``[..., out, in]``."""
    values = VALUES[weight[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15]
    groups = values.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None].astype(int) - 127)
    return groups.reshape(*weight.shape[:-1], -1)


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return floats(mx.array(values.astype(np.float32)).astype(mx.bfloat16))


@dataclass(frozen=True)
class Product:
    """Rows by one matrix, or by those of ``each`` experts that every row chose ``among`` the first of ``experts``.

    ``x`` has ``whole`` numbers or any; ``changes`` are of the kernels' module while the product is asked for.
    """

    rows: int
    outputs: int
    inputs: int
    bias: bool = False
    experts: int = 0
    each: int = 1
    among: int = 0
    whole: bool = True
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.rows}x{self.inputs}x{self.outputs}"]
        parts += [f"{self.each}-of-{self.experts}"] if self.experts else []
        parts += [f"among-{self.among}"] if self.among else []
        parts += [*map(str.lower, self.changes), *(["bias"] if self.bias else [])]
        return "-".join(parts)

    @cached_property
    def x(self) -> mx.array:
        numbers, shape = np.random.default_rng(7), (self.rows, self.inputs)
        values = numbers.integers(-2, 3, shape) if self.whole else numbers.normal(size=shape)
        return mx.array(values.astype(np.float32)).astype(mx.bfloat16)

    @cached_property
    def matrices(self) -> tuple[mx.array, mx.array, mx.array | None]:
        front = (self.experts,) if self.experts else ()
        numbers = np.random.default_rng(8)
        weight = numbers.integers(0, 2**32, (*front, self.outputs, self.inputs // 8), dtype=np.uint32)
        scales = numbers.integers(126, 129, (*front, self.outputs, self.inputs // 32), dtype=np.uint8)
        bias = mx.array(numbers.integers(-9, 10, (*front, self.outputs)), mx.bfloat16) if self.bias else None
        return mx.array(weight), mx.array(scales), bias

    @cached_property
    def chosen(self) -> np.ndarray:
        numbers, most = np.random.default_rng(9), self.among or self.experts
        choices = [numbers.permutation(most)[: self.each] for _ in range(self.rows)]
        return np.array(choices, np.uint32).flatten()

    def found(self, x: mx.array | None = None, chosen: np.ndarray | None = None) -> mx.array:
        with patch.multiple(_mxfp4_cuda, **AS_IT_IS | self.changes):
            lists = None
            if self.experts:
                chosen = self.chosen if chosen is None else chosen
                lists = ExpertLists.of(mx.array(chosen), self.experts)
            return mxfp4_product(self.x if x is None else x, *self.matrices, lists)

    def wanted(self) -> np.ndarray:
        weight, scales, bias = self.matrices
        plain, x = unpacked(np.array(weight), np.array(scales)), floats(self.x).astype(np.float64)
        offsets = 0 if bias is None else floats(bias)
        if not self.experts:
            return in_bfloat16(x @ plain.T + offsets)
        of_pairs = np.einsum("pi,poi->po", np.repeat(x, self.each, 0), plain[self.chosen])
        return in_bfloat16(of_pairs + (offsets if bias is None else offsets[self.chosen]))


AS_IT_IS = {"SCANNED_PAIRS": _mxfp4_cuda.SCANNED_PAIRS}
LISTED = {"SCANNED_PAIRS": 32}
"""Lists are made of so few pairs too."""

DENSE = [
    Product(1, 84, 704, bias=True),
    Product(2, 20, 4128),
    Product(8, 80, 96),
    Product(9, 80, 96, bias=True),
    Product(17, 80, 704),
    Product(41, 80, 96, bias=True),
    Product(65, 80, 352),
    Product(65, 64, 64, bias=True),
    Product(5, 80, 704, changes={"MOST_SHARED_OUTPUTS": 1}),
]
SCANNED = [
    Product(1, 80, 96, experts=16, each=4, bias=True),
    Product(3, 64, 704, experts=16, each=4),
    Product(15, 32, 96, experts=16, among=1, bias=True),
    Product(20, 80, 352, experts=4, each=2, bias=True),
    Product(40, 80, 64, experts=4, among=1),
    Product(128, 32, 96, experts=2, among=1),
]
SPREAD = [
    Product(20, 16, 96, experts=48, each=2, bias=True, changes=LISTED),
    Product(33, 80, 64, experts=20, each=3, among=5, bias=True, changes=LISTED),
    Product(513, 16, 64, experts=8),
    Product(75, 32, 288, experts=2, among=1, changes=LISTED),
]
SCALES = Product(64, 128, 64)
ALONE = [Product(8, 16, 704, whole=False), Product(3, 16, 704, experts=16, each=4, whole=False)]
AMONG_OTHERS = [
    Product(65, 16, 352, whole=False),
    Product(20, 16, 352, experts=4, each=2, whole=False),
    Product(20, 16, 96, experts=48, each=2, whole=False, changes=LISTED),
]


def broken(case: Product, text: str, old: str, new: str) -> Product:
    whole = getattr(_mxfp4_cuda, text)
    assert whole.count(old) == 1, f"{text} does not have once: {old}"
    return replace(case, changes=case.changes | {text: whole.replace(old, new)})


BROKEN = {
    "words are read in another order": broken(
        DENSE[4],
        "_PRODUCT",
        "const int at = (near * 4 + (part ^ ((near >> 1) & 3)))",
        "const int at = (near * 4 + part)",
    ),
    "copies are waited for too late": broken(DENSE[1], "_PRODUCT", '"n"(STAGES - 2)', '"n"(STAGES - 1)'),
    "sources are read too early": broken(
        DENSE[6], "_PRODUCT", "__syncthreads();  // that is there, and so are the scales", ""
    ),
    "the last outputs are not held back": broken(
        DENSE[0], "_PRODUCT", "row < now && output < outputs", "row < now"
    ),
    "no bias": broken(DENSE[3], "_PRODUCT", "if (BIASED)", "if (false)"),
    "lists begin one late": broken(
        SPREAD[1], "_LISTS", "starts[expert] = start;", "starts[expert] = start + 1;"
    ),
    "every expert's list begins at once": broken(
        SPREAD[1], "_LISTS", "other < warp; other++) start += own[other]", "other < warp; other++) start += 0"
    ),
    "addresses are not aligned": broken(
        DENSE[2], "_PRODUCT", "reinterpret_cast<const uint4*>(x) + place", "(const char*)x + place * 16 + 4"
    ),
    "rows after the last are copied": broken(
        DENSE[3], "_PRODUCT", "row < now && group < groups", "group < groups"
    ),
    "one thread of a warp counts": broken(
        SCANNED[3], "_PRODUCT", "if (warp == 0) {\n      int so_far", "if (thread == 0) {\n      int so_far"
    ),
    "the last copies are not waited for": broken(
        DENSE[4],
        "_PRODUCT",
        "stage < stages; stage++) {\n      asm",
        "stage < stages - 1; stage++) {\n      asm",
    ),
}
SEEN = {
    "sources are read too early": "outside of every array",
    "the last outputs are not held back": "beside its outputs",
    "lists begin one late": "beside its outputs",
    "every expert's list begins at once": "beside its outputs",
    "addresses are not aligned": "not aligned",
    "rows after the last are copied": "outside of every array",
    "one thread of a warp counts": "did not meet",
    "the last copies are not waited for": "nobody waited for",
}
"""What the host says. Of the others, that results differ."""

CHOICES = [
    (5, 32, 4, mx.float32),
    (9, 33, 8, mx.float32),
    (3, 70, 32, mx.float32),
    (1, 128, 8, mx.float32),
    (4, 31, 5, mx.bfloat16),
    (2, 1, 1, mx.float32),
]
"""Tokens, experts, and how many each chooses."""

SHARED = [((3, 8, 300), mx.float32), ((2, 4, 64), mx.bfloat16)]
"""Of outputs that are mixed: tokens, how many for each, and their size."""

EXPERTS, HIDDEN, INNER = 5, 64, 96
BLOCKS = [(False, 2), (True, 20)]
"""Whether there is a bias, and how many tokens: of few and of many pairs."""


def scores_of(tokens: int, experts: int, dtype: mx.Dtype, *, ties: bool) -> mx.array:
    numbers, shape = np.random.default_rng(experts), (tokens, experts)
    values = numbers.integers(0, 3, shape) if ties else numbers.normal(size=shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def scale_of(experts: int, is_there: bool) -> mx.array | None:
    return mx.array(np.linspace(0.5, 2, experts, dtype=np.float32)) if is_there else None


def block_of(*, bias: bool) -> SwitchGLU:
    mx.random.seed(3)
    block = SwitchGLU(HIDDEN, INNER, EXPERTS, activation=lambda up, gate: mx.tanh(gate) * (up + 1), bias=bias)
    for name in ("gate_proj", "up_proj", "down_proj"):
        if bias:
            block[name].bias = mx.random.normal(block[name].bias.shape).astype(mx.bfloat16)
        block[name] = block[name].to_quantized(group_size=32, bits=4, mode="mxfp4")
    return block


def through(block: SwitchGLU, count: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    tokens = mx.random.normal((count, HIDDEN), key=mx.random.key(1)).astype(mx.bfloat16)
    chosen = mx.array([[row % EXPERTS, (row + 1 + row % 3) % EXPERTS] for row in range(count)])
    with patch.multiple(_mxfp4_cuda, **LISTED):
        return gated_experts(block, tokens.astype(dtype), chosen)


@pytest.fixture(scope="session")
def host(tmp_path_factory) -> CudaOnHost:
    """With every kernel of this file compiled."""
    host = CudaOnHost()
    for case in [*DENSE, *SCANNED, *SPREAD, SCALES, *ALONE, *AMONG_OTHERS, *BROKEN.values()]:
        host.rehearse(case.found)
    for tokens, experts, count, dtype in CHOICES:
        for scaled in (False, True):
            scores, scale = scores_of(tokens, experts, dtype, ties=False), scale_of(experts, scaled)
            host.rehearse(partial(choose_experts, scores, count, scale))
    for shape, dtype in SHARED:
        host.rehearse(partial(mix, mx.zeros(shape, dtype), mx.zeros(shape[:2], dtype)))
    for bias, count in BLOCKS:
        host.rehearse(partial(through, block_of(bias=bias), count))
    host.compile(tmp_path_factory.mktemp("cuda"))
    return host


@pytest.mark.parametrize("case", [*DENSE, *SCANNED, *SPREAD], ids=str)
def test_a_product_is_exact_where_it_can_be(host, case) -> None:
    with host:
        found = case.found()
    np.testing.assert_array_equal(floats(found), case.wanted())


def test_every_value_comes_out_of_every_scale(host) -> None:
    """Rows of an identity matrix show the weights; the largest scales go over bfloat16."""
    scales = np.minimum(np.arange(256), 252).astype(np.uint8).reshape(128, 2)
    weight = np.full((128, 8), 0, np.uint32)
    weight[:, ::2], weight[:, 1::2] = 0x76543210, 0xFEDCBA98
    with host:
        found = mxfp4_product(mx.eye(64).astype(mx.bfloat16), mx.array(weight), mx.array(scales))
    np.testing.assert_array_equal(floats(found).T, unpacked(weight, scales).astype(np.float32))


PUBLISHED = {
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "gemma-4-26b-a4b, in": (704, 2816, 128, 8),
    "gemma-4-26b-a4b, out": (2816, 704, 128, 8),
}
"""Outputs, inputs, experts, and how many of them a token chooses."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_warm_up_runs_every_kernel_that_any_number_of_tokens_of_a_published_model_needs(name) -> None:
    """A kernel takes seconds to compile, so none may come first in a request."""
    outputs, inputs, experts, count = PUBLISHED[name]
    weight = mx.zeros((experts, outputs, inputs // 8), mx.uint32)  # never computed
    scales = mx.zeros((experts, outputs, inputs // 32), mx.uint8)

    def kernel(tokens: int) -> str:
        pairs = mx.zeros((tokens * count,), mx.uint32)
        lists = ExpertLists(pairs, pairs, pairs, are_made=pairs.size > _mxfp4_cuda.SCANNED_PAIRS)
        asked: list[str] = []

        def product(shared_bytes: int) -> Callable[..., list[mx.array]]:
            return lambda **given: asked.append(f"{shared_bytes} {given['template']}") or [pairs]

        with patch.object(_mxfp4_cuda, "_product", product):
            mxfp4_product(mx.zeros((tokens, inputs), mx.bfloat16), weight, scales, None, lists)
        return asked[0]

    needed = {kernel(tokens) for tokens in range(1, 513)}
    assert len(needed) > 2
    assert needed == {kernel(tokens) for tokens in batch_sizes(512)}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_kernel_that_is_wrong_is_noticed(host, wrong) -> None:
    case = BROKEN[wrong]
    with host, pytest.raises(AssertionError, match=SEEN.get(wrong, "Arrays are not equal")):
        np.testing.assert_array_equal(floats(case.found()), case.wanted())


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(host, case) -> None:
    chosen = case.chosen.reshape(case.rows, -1) if case.experts else None
    with host:
        together = case.found().reshape(case.rows, -1)
        for row in range(case.rows):
            alone = case.found(case.x[row : row + 1], None if chosen is None else chosen[row])
            assert mx.array_equal(alone.reshape(-1), together[row])


@pytest.mark.parametrize("case", AMONG_OTHERS, ids=str)
def test_a_row_has_the_bits_that_it_has_among_other_rows_elsewhere(host, case) -> None:
    """All rows but the first change places, and what they chose."""
    other = mx.concatenate([case.x[1:] * 3, case.x[:1]])
    chosen = None
    if case.experts:
        own = case.chosen.reshape(case.rows, -1)
        chosen = np.concatenate([(own[1:] + 1) % case.experts, own[:1]]).flatten()
    with host:
        before = case.found().reshape(case.rows, -1)
        after = case.found(other, chosen).reshape(case.rows, -1)
    assert mx.array_equal(before[0], after[-1])


@pytest.mark.parametrize(("pairs", "experts", "among"), [(513, 8, 8), (700, 70, 60), (1000, 3, 1)])
def test_lists_have_each_experts_pairs_in_their_order(host, pairs, experts, among) -> None:
    chosen = np.random.default_rng(pairs).integers(experts - among, experts, pairs, dtype=np.uint32)
    with host:
        lists = ExpertLists.of(mx.array(chosen), experts)
    assert lists.are_made
    np.testing.assert_array_equal(np.array(lists.order), np.argsort(chosen, kind="stable"))
    starts = np.searchsorted(np.sort(chosen), np.arange(experts + 1))
    np.testing.assert_array_equal(np.array(lists.starts), starts)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "count", "dtype"), CHOICES)
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(
    host, tokens, experts, count, dtype, ties, scaled
) -> None:
    scores, scale = scores_of(tokens, experts, dtype, ties=ties), scale_of(experts, scaled)
    with host:
        chosen, shares = (floats(each) for each in choose_experts(scores, count, scale))
    order = np.argsort(-floats(scores), kind="stable")[:, :count]
    np.testing.assert_array_equal(chosen, order)
    taken = np.exp(np.take_along_axis(floats(scores).astype(np.float64), order, -1))
    wanted = taken / taken.sum(-1, keepdims=True) * (floats(scale)[order] if scaled else 1)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5 if dtype == mx.float32 else 2**-8)


def test_a_score_that_is_no_number_shows_in_its_own_token_alone(host) -> None:
    scores = np.array(scores_of(9, 33, mx.float32, ties=False))
    scores[4, 32] = np.nan
    scores[6, 2:] = -np.inf
    with host:
        chosen, shares = (np.array(each) for each in choose_experts(mx.array(scores), 8))
    assert (chosen < 33).all()
    np.testing.assert_array_equal(np.isnan(shares).all(-1), np.arange(9) == 4)
    assert not np.isnan(np.delete(shares, 4, 0)).any()
    np.testing.assert_array_equal(shares[6, 2:], 0)


@pytest.mark.parametrize(("shape", "dtype"), SHARED)
def test_outputs_are_mixed_by_their_shares(host, shape, dtype) -> None:
    outputs = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)
    shares = mx.random.uniform(shape=shape[:2], key=mx.random.key(2)).astype(dtype)
    with host:
        found = floats(mix(outputs, shares))
    wanted = np.einsum("tkh,tk->th", floats(outputs).astype(np.float64), floats(shares).astype(np.float64))
    np.testing.assert_allclose(found, wanted, atol=1e-5 if dtype == mx.float32 else 0.02)


@pytest.mark.parametrize(("bias", "count"), BLOCKS)
def test_a_block_of_experts_gives_what_it_gives_without_kernels(host, bias, count) -> None:
    block = block_of(bias=bias)
    plain = floats(through(block, count, mx.float32))
    with host:
        found = floats(through(block, count))
    assert found.shape == plain.shape == (count, 2, HIDDEN)
    np.testing.assert_allclose(found, plain, atol=2**-7 * np.abs(plain).max())
