"""Run the kernels of decode steps in the shapes of real models, beside float64 on the host; exit 1 where they differ.

    python tools/check_kernels.py [--time]

What runs where no test suite can: on a machine with CUDA and without a network. With
``--time`` it times them beside the operations of MLX that they stand for. ``check_experts.py``
does the same for experts and packed matrices.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from darkbloom_core.engine._decode_cuda import attend_rows, serves
from darkbloom_core.fused import Term, normed_heads, residual_norms

ATTENTION = {
    "GPT-OSS, window": (64, 8, 64, 128, True),
    "GPT-OSS, full": (64, 8, 64, 2048, True),
    "Gemma 4, window": (16, 8, 256, 1024, False),
    "Gemma 4, full": (16, 2, 512, 2048, False),
}
"""Query heads, KV heads, head size, tokens of a slab, sinks."""
HEADS = {"Gemma 4, window": (16, 8, 256), "Gemma 4, full": (16, 2, 512), "small": (8, 2, 64)}
HIDDEN = {"GPT-OSS": 2880, "Gemma 4": 2816}
EPSILON, TOLERANCE = 1e-6, 0.02


def main() -> None:
    wrong = 0
    for name, shape in ATTENTION.items():
        for rows in (1, 4, 32):
            wrong += _attention_differs(name, rows, *shape)
    for name, (heads, kv_heads, dims) in HEADS.items():
        for rows, length in ((1, 1), (8, 1), (1, 256)):
            wrong += _heads_differ(name, rows, length, heads, kv_heads, dims)
    for name, hidden in HIDDEN.items():
        for tokens in (1, 8, 256):
            wrong += _residual_differs(name, tokens, hidden)
    sys.exit(1 if wrong else 0)


def _normal(*shape: int, seed: int = 0) -> mx.array:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return mx.array(values).astype(mx.bfloat16)


def _floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def _attention_differs(
    name: str, rows: int, heads: int, kv_heads: int, dims: int, tokens: int, has_sinks: bool
) -> bool:
    chance = np.random.default_rng(rows)
    q, scale = _normal(rows, heads, 1, dims), dims**-0.5
    k, v = (_normal(rows, kv_heads, tokens, dims, seed=seed) for seed in (1, 2))
    sinks = _normal(heads, seed=3) if has_sinks else None
    lanes, offsets = chance.permutation(rows), chance.integers(0, 2 * tokens, rows)
    held = np.minimum(offsets + 1, tokens)

    def ask(some: slice = slice(None)) -> mx.array:
        places = (mx.array(each[some].astype(np.int32)) for each in (lanes, offsets))
        return attend_rows(q[some], k, v, *places, scale=scale, sinks=sinks)

    assert serves(q, k, v)
    found = ask()
    wanted = np.stack(
        [
            _attend(_floats(q[row, :, 0]), _floats(k[lane]), _floats(v[lane]), count, scale, sinks)
            for row, (lane, count) in enumerate(zip(lanes.tolist(), held.tolist(), strict=True))
        ]
    )
    said = ""
    if "--time" in sys.argv:
        mask = mx.array(np.arange(tokens) < held[np.argsort(lanes)][:, None])[:, None, None]

        def mlx_s() -> mx.array:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

        said = _times(ask, mlx_s)
    alone = bool(mx.array_equal(found[:1], ask(slice(0, 1))).item())
    return _said(f"attention of {name}, {rows} rows", found[:, :, 0], wanted, alone, said)


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, count: int, scale: float, sinks: mx.array | None
) -> np.ndarray:
    each = q.shape[0] // k.shape[0]
    keys, values = (np.repeat(part[:, :count], each, axis=0) for part in (k, v))
    scores = np.einsum("hd,htd->ht", q, keys) * scale
    last = np.full((q.shape[0], 1), -np.inf) if sinks is None else _floats(sinks)[:, None]
    largest = np.maximum(scores.max(-1, keepdims=True), last)
    shares = np.exp(scores - largest)
    total = shares.sum(-1, keepdims=True) + np.exp(last - largest)
    return np.asarray(np.einsum("ht,htd->hd", shares / total, values))


def _heads_differ(name: str, rows: int, length: int, heads: int, kv_heads: int, dims: int) -> bool:
    q, k, v = (
        _normal(rows, length, count * dims, seed=seed)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    offsets = np.arange(rows) * 777 + 5
    periods = (10_000.0 ** (np.arange(dims // 2) / (dims // 2))).astype(np.float32)
    periods[dims // 8 :] = np.inf if "full" in name else periods[dims // 8 :]  # Gemma 4's do not all turn
    weights = [_normal(dims, seed=9), _normal(dims, seed=10)]
    placed = (mx.array(offsets.astype(np.int32)), mx.array(periods))

    def ask(rows: slice = slice(None)) -> tuple[mx.array, ...]:
        own = (each[rows] for each in (q, k, v))
        found = normed_heads(
            *own, dims, placed[0][rows], placed[1],
            query_weight=weights[0], key_weight=weights[1], epsilon=EPSILON,
        )  # fmt: skip
        return tuple(each for each in found if each is not None)

    def split(x: mx.array) -> np.ndarray:
        return _floats(x).reshape(rows, length, -1, dims).swapaxes(1, 2)

    angles = (offsets[:, None] + np.arange(length))[:, None, :, None] / periods.astype(np.float64)

    def turned(x: np.ndarray) -> np.ndarray:
        one, other = np.split(x, 2, axis=-1)
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cosine - other * sine, one * sine + other * cosine], axis=-1)

    wanted = (turned(_norm(split(q), weights[0])), turned(_norm(split(k), weights[1])), _norm(split(v)))
    said = ""
    if "--time" in sys.argv:

        def mlx_s() -> mx.array:
            parts = []
            for x, weight in ((q, weights[0]), (k, weights[1]), (v, None)):
                each = mx.fast.rms_norm(x.reshape(rows, length, -1, dims), weight, EPSILON).swapaxes(1, 2)
                if weight is not None:
                    each = mx.fast.rope(
                        each, dims, traditional=False, base=None, scale=1.0, offset=placed[0], freqs=placed[1]
                    )
                parts.append(each.sum())
            return mx.stack(parts)

        said = _times(lambda: mx.stack([each.sum() for each in ask()]), mlx_s)
    wrong = False
    first = ask(slice(0, 1))
    for what, one, single, values in zip(("queries", "keys", "values"), ask(), first, wanted, strict=True):
        alone = bool(mx.array_equal(one[:1], single).item())
        wrong |= _said(f"{what} of {name}, {rows} rows of {length}", one, values, alone, said)
        said = ""
    return wrong


def _residual_differs(name: str, tokens: int, hidden: int) -> bool:
    x, a, b = (_normal(1, tokens, hidden, seed=seed) for seed in range(3))
    weights = [_normal(hidden, seed=20 + number) for number in range(6)]
    half = mx.array([0.5], mx.bfloat16)
    cases: dict[str, tuple[list[Term], dict[str, Any]]] = {
        "two normed terms": (
            [Term(a, weights[0]), Term(b, weights[1])], {"weight": weights[2], "norms": weights[3:]},
        ),
        "and a scalar": ([Term(a, weights[0]), Term(b, weights[1])], {"weight": weights[2], "scalar": half}),
        "one term": ([Term(a)], {"norms": weights[3:4]}),
        "no term": ([], {"norms": weights[3:4]}),
    }  # fmt: skip
    wrong = False
    for case, (terms, more) in cases.items():

        def ask(
            some: slice = slice(None), terms: list[Term] = terms, more: dict[str, Any] = more
        ) -> tuple[mx.array, ...]:
            own = [Term(term.value[:, some], term.weight) for term in terms]
            return residual_norms(x[:, some], own, epsilon=EPSILON, **more)

        def mlx_s(terms: list[Term] = terms, more: dict[str, Any] = more) -> mx.array:
            joined = sum(
                (each.value if each.weight is None else mx.fast.rms_norm(each.value, each.weight, EPSILON))
                for each in terms
            )
            joined = mx.fast.rms_norm(joined, more["weight"], EPSILON) if "weight" in more else joined
            joined = (x + joined) * more.get("scalar", 1.0)
            return mx.stack(
                [joined, *(mx.fast.rms_norm(joined, each, EPSILON) for each in more.get("norms", ()))]
            )

        found = _floats(x)
        if terms:
            joined = sum(
                _norm(_floats(each.value), each.weight) if each.weight is not None else _floats(each.value)
                for each in terms
            )
            found = found + (_norm(joined, more["weight"]) if "weight" in more else joined)
            found = found * (0.5 if "scalar" in more else 1)
        wanted = [found, *(_norm(found, each) for each in more.get("norms", ()))]
        said = _times(lambda ask=ask: mx.stack([*ask()]), mlx_s) if "--time" in sys.argv else ""
        for number, (one, single, values) in enumerate(zip(ask(), ask(slice(0, 1)), wanted, strict=True)):
            alone = bool(mx.array_equal(one[:, :1], single).item())
            what = f"residual of {name}, {case}, {tokens} tokens, output {number}"
            wrong |= _said(what, one, values, alone, said)
            said = ""
    return wrong


def _norm(values: np.ndarray, weight: mx.array | None = None) -> np.ndarray:
    scale = 1 / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON)
    return np.asarray(values * scale * (1 if weight is None else _floats(weight)))


def _said(what: str, found: mx.array, wanted: np.ndarray, alone: bool, said: str) -> bool:
    off = float(np.abs(_floats(found) - wanted).max() / np.abs(wanted).max())
    print(f"{what}: off by {off:.2%} of the largest{'' if alone else ', NOT AS ALONE'}{said}", flush=True)
    return not off <= TOLERANCE or not alone


def _times(ours: Callable[[], mx.array], theirs: Callable[[], mx.array]) -> str:
    return f"; {_microseconds(ours):.0f} us, MLX's {_microseconds(theirs):.0f} us"


def _microseconds(run: Callable[[], mx.array], counts: Sequence[int] = (7, 20)) -> float:
    mx.eval(run())
    spent = []
    for _ in range(counts[0]):
        start = time.perf_counter()
        mx.eval([run() for _ in range(counts[1])])
        spent.append((time.perf_counter() - start) / counts[1] * 1e6)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
