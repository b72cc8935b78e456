"""The end of a block of a layer: what it found joins the residual, and the next block's norms look at the sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from darkbloom_core.fused._kernels import IN_NAMES, is_alike, without_comments

MOST_TERMS, MOST_NORMS = 2, 3
MOST_HIDDEN = 16_384

_THREADS = 256

_SOURCE = """
  // A block for each token; a thread looks after every THREADS-th element.
  constexpr int OWN = (HIDDEN + THREADS - 1) / THREADS;
  __shared__ float parts[THREADS / 32];
  const int thread = threadIdx.x;
  const long first = (long)blockIdx.x * HIDDEN;
  // The sum over all threads, for all of them.
  auto sum_of = [&](float value) {
    #pragma unroll
    for (int apart = 16; apart; apart >>= 1) value += __shfl_xor_sync(0xffffffffu, value, apart);
    __syncthreads();  // nobody reads the last sum's parts
    if (thread % 32 == 0) parts[thread / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    #pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) sum += parts[warp];
    return sum;
  };
  auto scale_of = [&](const float (&values)[OWN]) {
    float squares = 0.0f;
    #pragma unroll
    for (int at = 0; at < OWN; at++) squares = fmaf(values[at], values[at], squares);
    return rsqrtf(sum_of(squares) / HIDDEN + EPSILON);
  };
  auto load = [&](const T* from, float (&values)[OWN]) {
    #pragma unroll
    for (int at = 0; at < OWN; at++) {
      const int element = at * THREADS + thread;
      values[at] = element < HIDDEN ? static_cast<float>(from[first + element]) : 0.0f;
    }
  };
  float sum[OWN];
  load(TERMS > 0 ? a : x, sum);
  if (NORM_A) {
    const float scale = scale_of(sum);
    #pragma unroll
    for (int at = 0; at < OWN; at++) {
      const int element = at * THREADS + thread;
      if (element < HIDDEN) sum[at] *= scale * static_cast<float>(weight_a[element]);
    }
  }
  if (TERMS > 1) {
    float other[OWN];
    load(b, other);
    const float scale = NORM_B ? scale_of(other) : 1.0f;
    #pragma unroll
    for (int at = 0; at < OWN; at++) {
      const int element = at * THREADS + thread;
      if (element < HIDDEN) sum[at] += other[at] * (NORM_B ? scale * static_cast<float>(weight_b[element]) : 1.0f);
    }
  }
  if (TERMS > 0) {
    const float scale = NORM_ALL ? scale_of(sum) : 1.0f;
    const float factor = SCALED ? static_cast<float>(scalar[0]) : 1.0f;
    #pragma unroll
    for (int at = 0; at < OWN; at++) {
      const int element = at * THREADS + thread;
      if (element < HIDDEN) {
        if (NORM_ALL) sum[at] *= scale * static_cast<float>(weight_all[element]);
        const T rounded = static_cast<T>((static_cast<float>(x[first + element]) + sum[at]) * factor);
        joined[first + element] = rounded;
        sum[at] = static_cast<float>(rounded);
      }
    }
  }
  if (NORMS > 0) {
    const float scale = scale_of(sum);
    #pragma unroll
    for (int at = 0; at < OWN; at++) {
      const int element = at * THREADS + thread;
      if (element < HIDDEN) {
        const float value = sum[at] * scale;
        WRITE_NORMS
      }
    }
  }
"""


class Term(NamedTuple):
    """``value`` ``[..., H]``, through an RMS norm of ``weight`` ``[H]`` first if there is one."""

    value: mx.array
    weight: mx.array | None = None


def residual_norms(
    x: mx.array,
    terms: Sequence[Term],
    *,
    epsilon: float,
    weight: mx.array | None = None,
    scalar: mx.array | None = None,
    norms: Sequence[mx.array] = (),
) -> tuple[mx.array, ...]:
    """``(x + norm(terms)) * scalar`` ``[..., H]``, and RMS norms of it, one for each weight ``[H]`` of ``norms``.

    ``norm`` is an RMS norm of ``weight`` over the sum of ``terms``, if there is one;
    ``scalar`` is ``[1]``. Up to two terms, all of the shape of ``x``; ``epsilon`` is that of
    all norms. Without terms it is ``x`` and its norms, whose bits are those that the norms
    of an equal sum have. Raises ``ValueError`` for more terms or norms than a kernel takes,
    for other shapes than these, and for a weight or a scalar of no terms.
    """
    _check(x, terms, weight, scalar, norms)
    given = [*(each for term in terms for each in term), weight, scalar, *norms]
    if mx.cuda.is_available() and x.shape[-1] <= MOST_HIDDEN and is_alike(x, given):
        return _by_kernel(x, terms, epsilon, weight, scalar, norms)
    joined = x
    if terms:
        found = _term(terms[0], epsilon)
        for term in terms[1:]:
            found = found + _term(term, epsilon)
        joined = x + (found if weight is None else mx.fast.rms_norm(found, weight, epsilon))
        joined = joined if scalar is None else joined * scalar
    return (joined, *(mx.fast.rms_norm(joined, each, epsilon) for each in norms))


def _term(term: Term, epsilon: float) -> mx.array:
    return term.value if term.weight is None else mx.fast.rms_norm(term.value, term.weight, epsilon)


def _check(
    x: mx.array,
    terms: Sequence[Term],
    weight: mx.array | None,
    scalar: mx.array | None,
    norms: Sequence[mx.array],
) -> None:
    if len(terms) > MOST_TERMS or len(norms) > MOST_NORMS:
        raise ValueError(
            f"up to {MOST_TERMS} terms and {MOST_NORMS} norms, not {len(terms)} and {len(norms)}"
        )
    if not terms and (weight is not None or scalar is not None):
        raise ValueError("a weight and a scalar are for terms, of which there are none")
    wrong = [term.value.shape for term in terms if term.value.shape != x.shape]
    of_hidden = [*(term.weight for term in terms), weight, *norms]
    wrong += [each.shape for each in of_hidden if each is not None and each.shape != x.shape[-1:]]
    wrong += [] if scalar is None or scalar.size == 1 else [scalar.shape]
    if wrong:
        raise ValueError(
            f"terms are as x, {x.shape}, weights {x.shape[-1:]} and a scalar (1,), not {wrong[0]}"
        )


def _by_kernel(
    x: mx.array,
    terms: Sequence[Term],
    epsilon: float,
    weight: mx.array | None,
    scalar: mx.array | None,
    norms: Sequence[mx.array],
) -> tuple[mx.array, ...]:
    first, last = (terms[0], terms[-1]) if terms else (Term(x), Term(x))
    given = [first.weight, last.weight, weight, scalar]
    found = _kernel(len(norms), epsilon)(
        inputs=[
            x,
            first.value,
            last.value,
            *(x if each is None else each for each in given),  # which it does not look at
            *norms,
        ],
        template=[
            ("T", x.dtype),
            ("HIDDEN", x.shape[-1]),
            ("THREADS", _THREADS),
            ("TERMS", len(terms)),
            ("NORM_A", first.weight is not None),
            ("NORM_B", len(terms) > 1 and last.weight is not None),
            ("NORM_ALL", weight is not None),
            ("SCALED", scalar is not None),
            ("NORMS", len(norms)),
        ],
        grid=(x.size // x.shape[-1] * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[x.shape if terms else (1,), *[x.shape] * len(norms)],
        output_dtypes=[x.dtype] * (1 + len(norms)),
    )
    return (found[0] if terms else x, *found[1:])


@cache
def _kernel(norms: int, epsilon: float) -> Any:
    writes = [
        f"normed_{at}[first + element] = static_cast<T>(value * static_cast<float>(norm_{at}[element]));"
        for at in range(norms)
    ]
    source = f"constexpr float EPSILON = {epsilon!r}f;\n" + _SOURCE.replace("WRITE_NORMS", "\n".join(writes))
    return mx.fast.cuda_kernel(
        name=f"darkbloom_residual_{norms}_{epsilon.hex()}".translate(IN_NAMES),
        input_names=["x", "a", "b", "weight_a", "weight_b", "weight_all", "scalar"]
        + [f"norm_{at}" for at in range(norms)],
        output_names=["joined"] + [f"normed_{at}" for at in range(norms)],
        source=without_comments(source),
    )
