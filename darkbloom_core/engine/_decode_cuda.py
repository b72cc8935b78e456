"""A CUDA kernel that attends for all rows of a decode step at once, each row with its own number of keys.

Of MLX's operations a layer would be five kernels or more wherever a head size is over 128
or there is a mask, and launching them is most of what a decode step costs.
Always true: how a row is summed depends on its own number of keys and the shapes of the
slab alone, so its bits do not depend on its neighbours; nothing beyond its keys is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from darkbloom_core.contracts import LayerKind

MOST_KEYS = 4096
"""Tokens of a slab: one block walks all keys of a row."""

MOST_DIMS = 512
MOST_SHARING = 16
"""Query heads of one KV head."""

_WARPS = 8  # a block of 256 threads may use as many registers as there are for a thread

_HEADER = """
// Eight bfloat16, the first in the lowest bits.
__device__ inline void unpack_eight(uint4 bits, float* values) {
  const unsigned int words[4] = {bits.x, bits.y, bits.z, bits.w};
  #pragma unroll
  for (int at = 0; at < 4; at++) {
    values[2 * at] = __uint_as_float(words[at] << 16);
    values[2 * at + 1] = __uint_as_float(words[at] & 0xffff0000u);
  }
}
"""

_ATTEND = """
  // A block for each row and HEADS query heads of one KV head. A team of LANES threads looks at a key:
  // each at PIECES of its pieces of eight dims, every LANES-th. Teams take keys in turn.
  constexpr int OF_KEY = DIMS / 8, PIECES = (OF_KEY + LANES - 1) / LANES, OWN = PIECES * 8, TEAMS = 32 / LANES;
  constexpr int STRIDE = PIECES * LANES + 4;  // keeps reads and writes off one bank
  __shared__ float parts[WARPS][HEADS][8 * STRIDE];
  __shared__ float tops[HEADS][WARPS], totals[HEADS][WARPS];
  const int lane = threadIdx.x, warp = threadIdx.y, at = lane % LANES;
  const int row = blockIdx.y, first = blockIdx.x * HEADS, heads = gridDim.x * HEADS;
  const int kv_heads = k_shape[1], tokens = k_shape[2];
  const int keys = min((int)offsets[row] + 1, tokens);
  const long begin = ((long)lanes[row] * kv_heads + first / SHARING) * tokens * OF_KEY;
  const uint4* own_k = reinterpret_cast<const uint4*>(k) + begin;
  const uint4* own_v = reinterpret_cast<const uint4*>(v) + begin;
  const uint4 zeros = {0, 0, 0, 0};

  float query[HEADS][OWN], sums[HEADS][OWN] = {}, top[HEADS], total[HEADS];
  #pragma unroll
  for (int head = 0; head < HEADS; head++) {
    const uint4* of_head = reinterpret_cast<const uint4*>(q) + ((long)row * heads + first + head) * OF_KEY;
    #pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int place = piece * LANES + at;
      unpack_eight(place < OF_KEY ? of_head[place] : zeros, query[head] + piece * 8);
    }
    #pragma unroll
    for (int dim = 0; dim < OWN; dim++) query[head][dim] *= __int_as_float(SCALE_BITS);
    top[head] = -INFINITY;
    total[head] = 0.0f;
  }

  for (int from = warp * TEAMS; from < keys; from += WARPS * TEAMS * TURNS) {
    const int own = from + lane / LANES;
    uint4 some_k[TURNS][PIECES], some_v[TURNS][PIECES];
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int key = min(own + turn * WARPS * TEAMS, keys - 1);
      #pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        const int place = piece * LANES + at;
        some_k[turn][piece] = place < OF_KEY ? own_k[(long)key * OF_KEY + place] : zeros;
        some_v[turn][piece] = place < OF_KEY ? own_v[(long)key * OF_KEY + place] : zeros;
      }
    }
    float scores[TURNS][HEADS];
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      float values[OWN];
      #pragma unroll
      for (int piece = 0; piece < PIECES; piece++) unpack_eight(some_k[turn][piece], values + piece * 8);
      #pragma unroll
      for (int head = 0; head < HEADS; head++) {
        float score = 0.0f;
        #pragma unroll
        for (int dim = 0; dim < OWN; dim++) score = fmaf(query[head][dim], values[dim], score);
        #pragma unroll
        for (int apart = LANES / 2; apart; apart >>= 1) score += __shfl_xor_sync(0xffffffffu, score, apart);
        scores[turn][head] = own + turn * WARPS * TEAMS < keys ? score : -INFINITY;
      }
    }
    #pragma unroll
    for (int head = 0; head < HEADS; head++) {
      float highest = top[head];
      #pragma unroll
      for (int turn = 0; turn < TURNS; turn++) highest = fmaxf(highest, scores[turn][head]);
      const float base = highest == -INFINITY ? 0.0f : highest;  // a team that had no key yet
      const float shrink = __expf(top[head] - base);
      top[head] = highest;
      total[head] *= shrink;
      #pragma unroll
      for (int dim = 0; dim < OWN; dim++) sums[head][dim] *= shrink;
      #pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        scores[turn][head] = __expf(scores[turn][head] - base);
        total[head] += scores[turn][head];
      }
    }
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      float values[OWN];
      #pragma unroll
      for (int piece = 0; piece < PIECES; piece++) unpack_eight(some_v[turn][piece], values + piece * 8);
      #pragma unroll
      for (int head = 0; head < HEADS; head++) {
        #pragma unroll
        for (int dim = 0; dim < OWN; dim++)
          sums[head][dim] = fmaf(scores[turn][head], values[dim], sums[head][dim]);
      }
    }
  }

  // The teams of a warp, then the warps.
  #pragma unroll
  for (int apart = LANES; apart < 32; apart <<= 1) {
    #pragma unroll
    for (int head = 0; head < HEADS; head++) {
      const float other = __shfl_xor_sync(0xffffffffu, top[head], apart), highest = fmaxf(top[head], other);
      const float base = highest == -INFINITY ? 0.0f : highest;
      const float mine = __expf(top[head] - base), its = __expf(other - base);
      top[head] = highest;
      total[head] = total[head] * mine + __shfl_xor_sync(0xffffffffu, total[head], apart) * its;
      #pragma unroll
      for (int dim = 0; dim < OWN; dim++)
        sums[head][dim] = sums[head][dim] * mine + __shfl_xor_sync(0xffffffffu, sums[head][dim], apart) * its;
    }
  }
  #pragma unroll
  for (int head = 0; head < HEADS; head++) {
    if (lane == 0) {
      tops[head][warp] = top[head];
      totals[head][warp] = total[head];
    }
    if (lane < LANES) {
      #pragma unroll
      for (int dim = 0; dim < OWN; dim++)
        parts[warp][head][(dim % 8) * STRIDE + dim / 8 * LANES + at] = sums[head][dim];
    }
  }
  __syncthreads();
  for (int which = warp * 32 + lane; which < HEADS * DIMS; which += WARPS * 32) {
    const int head = which / DIMS, dim = which % DIMS;
    const float sink = SINKS ? static_cast<float>(sinks[first + head]) : -INFINITY;
    float highest = sink;
    #pragma unroll
    for (int other = 0; other < WARPS; other++) highest = fmaxf(highest, tops[head][other]);
    float all = __expf(sink - highest), sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS; other++) {
      const float share = __expf(tops[head][other] - highest);
      all = fmaf(totals[head][other], share, all);
      sum = fmaf(parts[other][head][(dim % 8) * STRIDE + dim / 8], share, sum);
    }
    out[((long)row * heads + first) * DIMS + which] = static_cast<T>(sum / all);
  }
"""


def serves(q: mx.array, k_slab: mx.array, v_slab: mx.array) -> bool:
    """Whether ``attend_rows`` can do it. ``q`` is ``[B, H, 1, D]``, the slabs ``[lanes, KV, T, D]``."""
    if not mx.cuda.is_available():
        return False
    heads, dims = q.shape[1], q.shape[3]
    _, kv_heads, tokens, k_dims = k_slab.shape
    return (
        q.dtype == k_slab.dtype == v_slab.dtype == mx.bfloat16
        and dims == k_dims
        and k_slab.shape == v_slab.shape
        and _fits(heads, kv_heads, dims, tokens)
    )


def serves_layers(layers: Sequence[LayerKind], shared_tokens: int) -> bool:
    """Whether it can do every layer's attention to rings and to a slab of ``shared_tokens`` tokens a row."""
    if not mx.cuda.is_available() or shared_tokens == 0:
        return False
    for kind in layers:
        if kind.state:
            continue
        source = kind if kind.source is None else layers[kind.source]
        is_alike = kind.dtype == source.dtype == "bfloat16" and kind.k_dim == kind.v_dim == source.k_dim
        tokens = shared_tokens if source.window is None else source.window
        if not is_alike or not _fits(kind.q_heads, source.kv_heads, kind.k_dim, tokens):
            return False
    return True


def _fits(heads: int, kv_heads: int, dims: int, tokens: int) -> bool:
    return (
        dims <= MOST_DIMS
        and dims % 32 == 0
        and heads % kv_heads == 0
        and heads // kv_heads <= MOST_SHARING
        and tokens <= MOST_KEYS
    )


def attend_rows(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lanes: mx.array,
    offsets: mx.array,
    *,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Row b looks at the first ``min(offsets[b] + 1, T)`` slots of lane ``lanes[b]``: ``[B, H, 1, D]`` bfloat16.

    ``q`` is ``[B, H, 1, D]``, ``k`` and ``v`` are whole slabs ``[lanes, KV, T, D]``, all
    bfloat16; ``lanes`` and ``offsets`` are ``[B]`` int32. It serves rings too: until one has
    wrapped its slots are positions, and after that every slot counts. ``sinks`` ``[H]`` are
    one more logit each, unscaled, that has no value. On CUDA only; see ``serves``.

    Computed in float32 by the online softmax of Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (2018): sums are kept relative to the largest score so far, and
    shrunk when a larger one comes.
    """
    rows, heads, _, dims = q.shape
    sharing = heads // k.shape[1]
    lanes_of_key = _lanes_of_key(dims)
    heads_of_block = _heads_of_block(dims, sharing)
    (out,) = _attend()(
        inputs=[q, k, v, lanes, offsets, q if sinks is None else sinks],
        template=[
            ("T", q.dtype),
            ("DIMS", dims),
            ("SHARING", sharing),
            ("HEADS", heads_of_block),
            ("LANES", lanes_of_key),
            ("TURNS", _turns(dims)),
            ("WARPS", _WARPS),
            ("SINKS", sinks is not None),
            ("SINK", q.dtype if sinks is None else sinks.dtype),  # a kernel's name has no dtypes but these
            ("SCALE_BITS", _bits(scale)),
        ],
        grid=(32 * (heads // heads_of_block), _WARPS * rows, 1),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )
    found: mx.array = out
    return found


def _lanes_of_key(dims: int) -> int:
    """Threads that look at a key together: a power of two, so that they can add up in halves."""
    return int(min(32, 1 << (dims // 8 - 1).bit_length()))


def _heads_of_block(dims: int, sharing: int) -> int:
    """Of the query heads of a KV head: few enough that queries and sums stay in registers and in 48,000 bytes."""
    most = 4 if dims <= 256 else 2
    return next(count for count in range(most, 0, -1) if sharing % count == 0)


def _turns(dims: int) -> int:
    """Keys that a thread reads at once."""
    return 8 if 128 < dims <= 256 else 4


def _bits(scale: float) -> int:
    """Of a float32: kernels take no other constants than whole numbers. Of a negative one MLX makes no name."""
    (bits,) = struct.unpack("<i", struct.pack("<f", scale))
    return int(bits)


@cache
def _attend() -> Any:
    return mx.fast.cuda_kernel(
        name="darkbloom_attend_rows",
        input_names=["q", "k", "v", "lanes", "offsets", "sinks"],
        output_names=["out"],
        source=_without_comments(_ATTEND),
        header=_without_comments(_HEADER),
    )


def _without_comments(source: str) -> str:
    """MLX hashes the source at each call, so it is short."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)
