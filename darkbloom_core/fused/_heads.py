"""Queries, keys and values on their way to the cache: split into heads, normed, turned."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from darkbloom_core.fused._kernels import IN_NAMES, is_alike, without_comments

MOST_DIMS = 1024

_WARPS = 4

_SOURCE = """
  // A warp for each head of each token; a lane looks after every 32nd element, so after both of a pair.
  constexpr int OWN = SIZE / 32, HEADS = QUERIES + 2 * KEYS;
  const int lane = threadIdx.x, rows = q_shape[0], length = q_shape[1];
  const long which = (long)blockIdx.x * WARPS + threadIdx.y;
  if (which >= (long)rows * length * HEADS) return;
  const int head = which % HEADS, token = which / HEADS, row = token / length, at_token = token % length;
  const bool is_query = head < QUERIES, is_key = !is_query && head < QUERIES + KEYS;
  const int own_head = is_query ? head : is_key ? head - QUERIES : head - QUERIES - KEYS;
  const int own_heads = is_query ? QUERIES : KEYS;
  const T* from = (is_query ? q : is_key ? k : v) + ((long)token * own_heads + own_head) * SIZE;
  T* to = (is_query ? queries : is_key ? keys : values)
      + (((long)row * own_heads + own_head) * length + at_token) * SIZE;
  float own[OWN], squares = 0.0f;
  #pragma unroll
  for (int at = 0; at < OWN; at++) {
    own[at] = static_cast<float>(from[at * 32 + lane]);
    squares = fmaf(own[at], own[at], squares);
  }
  #pragma unroll
  for (int apart = 16; apart; apart >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, apart);
  const float scale = rsqrtf(squares / SIZE + EPSILON);
  #pragma unroll
  for (int at = 0; at < OWN; at++) {
    own[at] *= scale;
    if (is_query) own[at] *= static_cast<float>(query_weight[at * 32 + lane]);
    if (is_key) own[at] *= static_cast<float>(key_weight[at * 32 + lane]);
  }
  if (is_query || is_key) {
    const float position = static_cast<float>(offsets[row] + at_token);
    #pragma unroll
    for (int at = 0; at < OWN / 2; at++) {
      const float angle = position * static_cast<float>(1.0 / periods[at * 32 + lane]);
      const float cosine = cosf(angle), sine = sinf(angle), one = own[at], other = own[at + OWN / 2];
      own[at] = one * cosine - other * sine;
      own[at + OWN / 2] = one * sine + other * cosine;
    }
  }
  #pragma unroll
  for (int at = 0; at < OWN; at++) to[at * 32 + lane] = static_cast<T>(own[at]);
"""


def normed_heads(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    head_dim: int,
    offsets: mx.array,
    periods: mx.array,
    *,
    query_weight: mx.array,
    key_weight: mx.array | None,
    epsilon: float,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """``q`` ``[B, L, heads * D]``, and ``k`` and ``v`` with theirs, or None both, as ``[B, heads, L, D]``.

    Every head goes through an RMS norm, of ``query_weight`` and ``key_weight`` ``[D]``; values have no weight.
    Queries and keys are turned (rotary embedding, in halves: pair i is elements i and i + D / 2): row b's
    first token stands at position ``offsets[b]``, ``[B]`` int32, and ``periods`` ``[D / 2]`` float32 are the
    positions in which a pair turns by one radian, infinite if it does not turn. ``D`` is
    ``head_dim``, ``epsilon`` that of all norms. Raises ``ValueError`` for widths that are no
    whole heads, keys and values of other numbers of heads, and keys without values or a weight.
    """
    _check(q, k, v, head_dim, key_weight)
    is_placed = offsets.dtype == mx.int32 and periods.dtype == mx.float32
    is_served = head_dim % 64 == 0 and head_dim <= MOST_DIMS and is_placed
    if mx.cuda.is_available() and is_served and is_alike(q, [k, v, query_weight, key_weight]):
        return _by_kernel(q, k, v, head_dim, offsets, periods, query_weight, key_weight, epsilon)

    def split(x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, head_dim)

    def turned(x: mx.array, weight: mx.array | None) -> mx.array:
        heads = mx.fast.rms_norm(split(x), weight, epsilon).swapaxes(1, 2)
        return mx.fast.rope(
            heads, head_dim, traditional=False, base=None, scale=1.0, offset=offsets, freqs=periods
        )

    if k is None or v is None:
        return turned(q, query_weight), None, None
    values = mx.fast.rms_norm(split(v), None, epsilon).swapaxes(1, 2)
    return turned(q, query_weight), turned(k, key_weight), values


def _check(
    q: mx.array, k: mx.array | None, v: mx.array | None, head_dim: int, key_weight: mx.array | None
) -> None:
    if (k is None) != (v is None) or (k is None) != (key_weight is None):
        raise ValueError("keys come with values and a weight, or there is none of the three")
    widths = [each.shape[-1] for each in (q, k, v) if each is not None]
    if any(width % head_dim for width in widths) or widths[1:2] != widths[2:]:
        raise ValueError(f"whole heads of {head_dim}, as many of keys as of values, not {widths}")


def _by_kernel(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    head_dim: int,
    offsets: mx.array,
    periods: mx.array,
    query_weight: mx.array,
    key_weight: mx.array | None,
    epsilon: float,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    rows, length, width = q.shape
    q_heads, kv_heads = width // head_dim, 0 if k is None else k.shape[-1] // head_dim
    warps = rows * length * (q_heads + 2 * kv_heads)
    none = (1,)  # of keys and values, where there are none
    queries, keys, values = _kernel(epsilon)(
        inputs=[
            q,
            q if k is None else k,
            q if v is None else v,
            query_weight,
            query_weight if key_weight is None else key_weight,
            offsets,
            periods,
        ],
        template=[
            ("T", q.dtype),
            ("SIZE", head_dim),
            ("QUERIES", q_heads),
            ("KEYS", kv_heads),
            ("WARPS", _WARPS),
        ],
        grid=(-(-warps // _WARPS) * 32, _WARPS, 1),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[
            (rows, q_heads, length, head_dim),
            *[(rows, kv_heads, length, head_dim) if kv_heads else none] * 2,
        ],
        output_dtypes=[q.dtype] * 3,
    )
    return queries, keys if kv_heads else None, values if kv_heads else None


@cache
def _kernel(epsilon: float) -> Any:
    return mx.fast.cuda_kernel(
        name=f"darkbloom_normed_heads_{epsilon.hex()}".translate(IN_NAMES),
        input_names=["q", "k", "v", "query_weight", "key_weight", "offsets", "periods"],
        output_names=["queries", "keys", "values"],
        source=without_comments(f"constexpr float EPSILON = {epsilon!r}f;\n" + _SOURCE),
    )
