"""The CUDA kernel for attention of decode steps, run thread by thread on the host: what it computes, not how fast.

Slots that a row must not look at hold NaN, and so do lanes of no row.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from cuda_on_host import CudaOnHost
from toy_family import full, window

from darkbloom_core.engine import KvStore, _decode, _decode_cuda
from darkbloom_core.engine._decode import DecodeBatch, DecodeShape, decode_shape, layer_arrays
from darkbloom_core.engine._decode_cuda import MOST_KEYS, attend_rows, serves

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no CUDA"),
]

LANES = 6


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def normal(key: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(key)).astype(mx.bfloat16)


@dataclass(frozen=True)
class Look:
    """Rows at ``offsets`` in ``lanes`` of a slab. ``changes`` are of the kernel's module while it is asked for."""

    dims: int
    kv_heads: int
    sharing: int
    tokens: int
    offsets: tuple[int, ...]
    lanes: tuple[int, ...]
    sinks: mx.Dtype | None = None
    changes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        sinks = "" if self.sinks is None else f"-{str(self.sinks).removeprefix('mlx.core.')}-sinks"
        return f"{self.dims}-{self.kv_heads}x{self.sharing}{sinks}"

    @property
    def scale(self) -> float:
        return 2 * self.dims**-0.5

    @property
    def held(self) -> list[int]:
        """Keys of each row."""
        return [min(offset + 1, self.tokens) for offset in self.offsets]

    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """q, both slabs, sinks."""
        heads = self.kv_heads * self.sharing
        is_held = np.zeros((LANES, 1, self.tokens, 1), bool)
        for lane, held in zip(self.lanes, self.held, strict=True):
            is_held[lane, :, :held] = True
        slabs = [
            mx.where(mx.array(is_held), normal(key, LANES, self.kv_heads, self.tokens, self.dims), mx.nan)
            for key in (1, 2)
        ]
        sinks = None if self.sinks is None else (2 * normal(4, heads)).astype(self.sinks)
        q = normal(3, len(self.lanes), heads, 1, self.dims)
        return q, *(each.astype(mx.bfloat16) for each in slabs), sinks

    def found(self, only: int | None = None) -> mx.array:
        """Of all rows, or of one of them."""
        rows = slice(None) if only is None else slice(only, only + 1)
        q, k, v, sinks = self.arrays()
        assert serves(q, k, v)
        with patch.multiple(_decode_cuda, **AS_IT_IS | self.changes):
            lanes, offsets = (mx.array(each[rows], mx.int32) for each in (self.lanes, self.offsets))
            return attend_rows(q[rows], k, v, lanes, offsets, scale=self.scale, sinks=sinks)

    def wanted(self) -> np.ndarray:
        """In float64."""
        q, k, v, sinks = (None if each is None else floats(each).astype(np.float64) for each in self.arrays())
        out = np.zeros_like(q)
        for row, (lane, held) in enumerate(zip(self.lanes, self.held, strict=True)):
            for head in range(q.shape[1]):
                of_head = (lane, head // self.sharing, slice(held))
                weights = np.exp(k[of_head] @ q[row, head, 0] * self.scale)
                all_of = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
                out[row, head, 0] = weights @ v[of_head] / all_of
        return out


AS_IT_IS = {"_ATTEND": _decode_cuda._ATTEND}
LOOKS = [
    Look(64, 2, 8, 150, (149, 0, 130), (1, 5, 4), mx.bfloat16),
    Look(64, 2, 1, 40, (38, 39, 40, 0), (3, 0, 5, 2)),
    Look(64, 1, 2, 33, (5, 1000), (0, 2), mx.float32),
    Look(256, 1, 8, 70, (69, 68, 30), (2, 1, 4)),
    Look(256, 2, 2, 72, (0, 71, 64), (5, 3, 0), mx.bfloat16),
    Look(256, 1, 1, 20, (200, 7), (4, 5)),
    Look(512, 1, 8, 36, (34, 36), (3, 1)),
    Look(512, 1, 2, 40, (0, 39), (1, 0), mx.float32),
    Look(512, 2, 1, 12, (5, 11), (2, 4), mx.bfloat16),
    Look(128, 1, 16, 70, (66, 80), (1, 3)),
    Look(96, 1, 3, 20, (13, 19), (4, 2), mx.bfloat16),
    Look(32, 2, 5, 9, (3, 8), (1, 2)),
    Look(288, 1, 7, 9, (8, 4), (3, 5)),
]
"""All head sizes and groups that there are checkpoints of, and some between."""


def broken(case: Look, old: str, new: str) -> Look:
    whole = _decode_cuda._ATTEND
    assert whole.count(old) == 1, f"the kernel does not have once: {old}"
    return replace(case, changes={"_ATTEND": whole.replace(old, new)})


BROKEN = {
    "the last key is left out": broken(LOOKS[1], "offsets[row] + 1", "offsets[row]"),
    "the sink is left out": broken(LOOKS[0], "SINKS ?", "false ?"),
    "rows are taken for lanes": broken(LOOKS[4], "lanes[row]", "row"),
    "slots after a row's are read": broken(LOOKS[1], "keys - 1", "tokens - 1"),
    "the last key counts twice": broken(LOOKS[9], "WARPS * TEAMS < keys ? score", "0 < tokens ? score"),
    "sums are not shrunk": broken(LOOKS[3], "sums[head][dim] *= shrink;", ""),
    "parts are read too early": broken(LOOKS[6], "__syncthreads();", ""),
    "a ring that has wrapped is left": broken(
        LOOKS[2], "tokens);\n  const long", "tokens * 2);\n  const long"
    ),
}

WINDOW, SHARED = 24, 256
ALIKE = {"k_dim": 64, "v_dim": 64, "scale": 0.125, "dtype": "bfloat16"}
KINDS = [
    window(WINDOW, q_heads=4, sinks=True, **ALIKE),
    full(q_heads=4, **ALIKE),
    window(WINDOW, q_heads=8, source=0, **ALIKE),
]
STEPS = {
    "one row": ([9], [0]),
    "near lengths": ([60, 70], [0, 1]),
    "unlike lengths, and holes": ([5, 23, 150], [1, 3, 4]),
    "a row with buffers of its own": ([30, 300], [0, 2]),
}
"""Positions and lanes."""


def a_step(positions: list[int], lanes: list[int], *, exact: bool) -> list[mx.array]:
    """What each layer of ``KINDS`` attends to in a step over random KV."""
    store = KvStore(KINDS, LANES, SHARED)
    opened = [store.open_row(1, 512) for _ in range(LANES)]
    rows = [opened[lane] for lane in lanes]
    for index, slab in enumerate(store.slabs):
        if slab is not None:
            slab.k, slab.v = normal(index, *slab.k.shape), normal(index + 10, *slab.v.shape)
    for row, position in zip(rows, positions, strict=True):
        store.make_room(row, position + 1)
    shape = decode_shape(store, rows, positions, exact=exact)
    batch = DecodeBatch(KINDS, shape, mx.array(positions, mx.int32), layer_arrays(store, rows))
    found = []
    for at, (kind, cache) in enumerate(zip(KINDS, batch.caches, strict=True)):
        q = normal(20 + at, len(rows), kind.q_heads, 1, kind.k_dim)
        k, v = (2 * normal(30 + at + which, len(rows), kind.kv_heads, 1, kind.k_dim) for which in (0, 5))
        new = (None, None) if kind.source is not None else (k, v)
        found.append(cache.attend(q, *new, sinks=normal(40, kind.q_heads) if kind.sinks else None))
    return found


@pytest.fixture(scope="session")
def host(tmp_path_factory) -> CudaOnHost:
    """With every kernel of this file compiled."""
    host = CudaOnHost()
    for case in [*LOOKS, *BROKEN.values()]:
        host.rehearse(case.found)
    host.rehearse(partial(a_step, *STEPS["one row"], exact=False))
    host.compile(tmp_path_factory.mktemp("cuda"))
    return host


@pytest.mark.parametrize("case", LOOKS, ids=str)
def test_every_row_attends_to_its_own_keys(host, case) -> None:
    with host:
        found = floats(case.found())
    np.testing.assert_allclose(found, case.wanted(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("case", LOOKS, ids=str)
def test_a_row_gets_what_mlx_gives_for_it(host, case) -> None:
    q, k, v, sinks = (None if each is None else each.astype(mx.float32) for each in case.arrays())
    with host:
        found = floats(case.found())
    for row, (lane, held) in enumerate(zip(case.lanes, case.held, strict=True)):
        own = [each[lane : lane + 1, :, :held] for each in (k, v)]
        alone = mx.fast.scaled_dot_product_attention(
            q[row : row + 1], *own, scale=case.scale, sinks=sinks, stream=mx.cpu
        )
        np.testing.assert_allclose(found[row], floats(alone)[0], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_kernel_that_is_wrong_is_noticed(host, wrong) -> None:
    case = BROKEN[wrong]
    with host, pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(floats(case.found()), case.wanted(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("case", [LOOKS[0], LOOKS[4], LOOKS[6]], ids=str)
def test_a_row_has_the_bits_that_it_has_alone(host, case) -> None:
    with host:
        together = case.found()
        for row in range(len(case.lanes)):
            assert mx.array_equal(case.found(row), together[row : row + 1])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("which", STEPS)
def test_a_step_gives_what_it_gives_without_the_kernel(host, which, exact) -> None:
    positions, lanes = STEPS[which]
    plain = a_step(positions, lanes, exact=exact)
    is_mlx_s = exact and len(positions) == 1  # at this head size it has a kernel for that
    is_ours = max(positions) < SHARED and not is_mlx_s
    nothing_else = patch.object(_decode, "attention", side_effect=AssertionError("without the kernel"))
    with host, nothing_else if is_ours else nullcontext():
        found = a_step(positions, lanes, exact=exact)
    for one, other in zip(found, plain, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(floats(one), floats(other), rtol=2**-6, atol=0.02)


def test_one_compiled_graph_serves_rows_of_all_lengths(host) -> None:
    """The kernel goes by the offsets, so a rounded shape says nothing of lengths."""

    def shapes() -> list[DecodeShape]:
        store = KvStore(KINDS, LANES, SHARED)
        rows = [store.open_row(1, 512) for _ in range(2)]
        lengths = ([1, 5], [70, 3], [200, 60], [250, 255])
        return [decode_shape(store, rows, positions, exact=False) for positions in lengths]

    assert len(set(shapes())) > 1
    with host:
        assert len(set(shapes())) == 1


def test_layers_that_the_kernel_does_not_do_keep_the_shapes_of_their_views(host) -> None:
    wide = full(q_heads=4, **(ALIKE | {"k_dim": 544, "v_dim": 544}))
    float32 = full(q_heads=4, **(ALIKE | {"dtype": "float32"}))
    borrowing = window(WINDOW, q_heads=34, source=0, **ALIKE)
    with host:
        assert KvStore(KINDS, LANES, SHARED).has_kernel
        assert not KvStore(KINDS, LANES, 0).has_kernel
        for other in (wide, float32, borrowing):
            assert not KvStore([*KINDS, other], LANES, SHARED).has_kernel
    assert not KvStore(KINDS, LANES, SHARED).has_kernel


def test_what_the_kernel_does_not_do_is_left_to_mlx(host) -> None:
    def slab(kv_heads: int = 2, tokens: int = MOST_KEYS, dims: int = 64, dtype=mx.bfloat16) -> mx.array:
        return mx.zeros((1, kv_heads, tokens, dims), dtype)

    def query(heads: int = 4, dims: int = 64, dtype=mx.bfloat16) -> mx.array:
        return mx.zeros((1, heads, 1, dims), dtype)

    assert serves(query(), slab(), slab()) == mx.cuda.is_available()
    with host:
        assert serves(query(), slab(), slab())
        assert serves(query(32, 512), slab(dims=512), slab(dims=512))
        assert not serves(query(dtype=mx.float32), slab(), slab())
        assert not serves(query(), slab(), slab(dtype=mx.float16))
        assert not serves(query(), slab(), slab(dims=32))
        assert not serves(query(dims=80), slab(dims=80), slab(dims=80))
        assert not serves(query(dims=544), slab(dims=544), slab(dims=544))
        assert not serves(query(34), slab(), slab())
        assert not serves(query(3), slab(), slab())
        assert not serves(query(), slab(tokens=MOST_KEYS + 1), slab(tokens=MOST_KEYS + 1))
