"""A CUDA kernel for rows that go through MXFP4 experts: what a decode step does.

MLX multiplies each pair of a row and an expert as a matrix of one row in a tile of sixteen.
Here a warp holds some outputs of one expert and reads their weights once for up to four of
the rows that chose it. Always true: the order in which an output's products are summed is
the same for every number of rows, so a row's bits do not depend on its neighbours.

MXFP4 (OCP Microscaling Formats 1.0): 32 values of 4 bits, e2m1, share a scale of 8 bits,
e8m0. MLX packs eight values into a word, the first in the lowest bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

MOST_PAIRS = 512
"""Of a row and an expert, in one call."""

MOST_INPUTS = 5_600
"""Four rows of so many 16-bit inputs stay, with the lists of pairs, below the 48 KiB of shared memory that every kernel may have."""

_ROWS = 4  # outputs of a warp
_WARPS = 8  # of a block
_AT_ONCE = 4  # rows for which weights are read once

_HEADER = """
#include <cuda_fp16.h>

// ROWS outputs for COUNT inputs; every lane of the warp has the sums in the end.
template <int COUNT, int ROWS>
__device__ inline void outputs_of(
    const uint4* inputs, const uint4* weights, const unsigned char* scales, int groups, int lane,
    float (&sums)[ROWS][4]) {
  for (int group = lane; group < groups; group += 32) {
    uint4 packed[ROWS];
    float parts[ROWS][COUNT];
    #pragma unroll
    for (int row = 0; row < ROWS; row++) {
      packed[row] = weights[(long)row * groups + group];
      #pragma unroll
      for (int one = 0; one < COUNT; one++) parts[row][one] = 0.0f;
    }
    #pragma unroll
    for (int word = 0; word < 4; word++) {
      float x[COUNT][8];
      #pragma unroll
      for (int one = 0; one < COUNT; one++) {
        const uint4 four = inputs[(one * 4 + word) * groups + group];
        const unsigned int pairs[4] = {four.x, four.y, four.z, four.w};
        #pragma unroll
        for (int pair = 0; pair < 4; pair++) {
          x[one][2 * pair] = __uint_as_float(pairs[pair] << 16);
          x[one][2 * pair + 1] = __uint_as_float(pairs[pair] & 0xffff0000u);
        }
      }
      #pragma unroll
      for (int row = 0; row < ROWS; row++) {
        const unsigned int bits =
            word == 0 ? packed[row].x : word == 1 ? packed[row].y : word == 2 ? packed[row].z : packed[row].w;
        // Sign, two bits of exponent and one of fraction, put where a half has them: 2^-14 of the value.
        unsigned int halves[4] = {
            ((bits & 0x00070007u) << 9) | ((bits & 0x00080008u) << 12),
            ((bits & 0x00700070u) << 5) | ((bits & 0x00800080u) << 8),
            ((bits & 0x07000700u) << 1) | ((bits & 0x08000800u) << 4),
            ((bits & 0x70007000u) >> 3) | (bits & 0x80008000u)};
        #pragma unroll
        for (int at = 0; at < 4; at++) {
          const float2 two = __half22float2(*reinterpret_cast<__half2*>(&halves[at]));
          #pragma unroll
          for (int one = 0; one < COUNT; one++) {
            parts[row][one] = fmaf(two.x, x[one][at], parts[row][one]);
            parts[row][one] = fmaf(two.y, x[one][at + 4], parts[row][one]);
          }
        }
      }
    }
    #pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const unsigned int exponent = scales[(long)row * groups + group] + 14u;
      const float scale = __uint_as_float(min(exponent, 254u) << 23);
      #pragma unroll
      for (int one = 0; one < COUNT; one++) sums[row][one] = fmaf(parts[row][one], scale, sums[row][one]);
    }
  }
  #pragma unroll
  for (int row = 0; row < ROWS; row++) {
    #pragma unroll
    for (int one = 0; one < COUNT; one++) {
      #pragma unroll
      for (int apart = 16; apart; apart >>= 1)
        sums[row][one] += __shfl_xor_sync(0xffffffffu, sums[row][one], apart);
    }
  }
}
"""

_SOURCE = """
  extern __shared__ uint4 inputs[];  // [AT_ONCE][4][groups]: a group's words apart, so that lanes read side by side
  __shared__ int asked[MOST_PAIRS];
  __shared__ int mine[MOST_PAIRS];
  __shared__ int found;
  const int pairs = chosen_shape[0];
  const int lane = threadIdx.x, thread = threadIdx.y * 32 + threadIdx.x;
  const int groups = IN / 32;
  int expert, count;
  if (GROUPED) {
    expert = blockIdx.z;
    for (int pair = thread; pair < pairs; pair += WARPS * 32) asked[pair] = chosen[pair];
    __syncthreads();
    if (threadIdx.y == 0) {
      int so_far = 0;
      for (int from = 0; from < pairs; from += 32) {
        const bool is_mine = from + lane < pairs && asked[from + lane] == expert;
        const unsigned int who = __ballot_sync(0xffffffffu, is_mine);
        if (is_mine) mine[so_far + __popc(who & ((1u << lane) - 1u))] = from + lane;
        so_far += __popc(who);
      }
      if (lane == 0) found = so_far;
    }
    __syncthreads();
    count = found;
    if (count == 0) return;
  } else {
    expert = chosen[blockIdx.z];
    count = 1;
    if (thread == 0) mine[0] = blockIdx.z;
    __syncthreads();
  }
  const int first = (blockIdx.y * WARPS + threadIdx.y) * ROWS;
  const uint4* w = reinterpret_cast<const uint4*>(weight) + ((long)expert * OUT + first) * groups;
  const unsigned char* s = scales + ((long)expert * OUT + first) * groups;
  for (int from = 0; from < count; from += AT_ONCE) {
    const int now = min(AT_ONCE, count - from);
    if (from > 0) __syncthreads();
    for (int one = 0; one < now; one++) {
      const uint4* row = reinterpret_cast<const uint4*>(x) + (long)(mine[from + one] / SHARED_BY) * groups * 4;
      for (int at = thread; at < groups * 4; at += WARPS * 32)
        inputs[(one * 4 + (at & 3)) * groups + (at >> 2)] = row[at];
    }
    __syncthreads();
    if (first < OUT) {
      float sums[ROWS][4] = {};
      if (now == 1) outputs_of<1, ROWS>(inputs, w, s, groups, lane, sums);
      else if (now == 2) outputs_of<2, ROWS>(inputs, w, s, groups, lane, sums);
      else if (now == 3) outputs_of<3, ROWS>(inputs, w, s, groups, lane, sums);
      else outputs_of<4, ROWS>(inputs, w, s, groups, lane, sums);
      if (lane < now) {
        #pragma unroll
        for (int row = 0; row < ROWS; row++) {
          float sum = lane == 0 ? sums[row][0] : lane == 1 ? sums[row][1] : lane == 2 ? sums[row][2] : sums[row][3];
          if (BIASED) sum += static_cast<float>(bias[(long)expert * OUT + first + row]);
          out[(long)mine[from + lane] * OUT + first + row] = static_cast<T>(sum);
        }
      }
    }
  }
"""


def serves(x: mx.array, weight: mx.array, packing: dict[str, Any], pairs: int) -> bool:
    """Whether ``mxfp4_rows`` can do it. ``weight`` is ``[E, out, in / 8]``."""
    inputs, outputs = weight.shape[-1] * 8, weight.shape[-2]
    return (
        packing == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        and x.dtype == mx.bfloat16
        and pairs <= MOST_PAIRS
        and inputs <= MOST_INPUTS
        and outputs % _ROWS == 0
    )


def mxfp4_rows(
    x: mx.array, weight: mx.array, scales: mx.array, bias: mx.array | None, chosen: mx.array
) -> mx.array:
    """Each row of ``x`` by the experts that it chose, plus their bias: ``[P, out]`` bfloat16.

    ``x`` is ``[R, in]`` bfloat16 and ``chosen`` ``[P]`` uint32, P a multiple of R: row r has
    the entries from ``r * P / R`` on. ``weight`` is ``[E, out, in / 8]`` uint32, ``scales``
    ``[E, out, in / 32]`` uint8 and ``bias`` ``[E, out]``. On CUDA only; see ``serves``.
    """
    experts, outputs, words = weight.shape
    pairs, inputs = chosen.shape[0], words * 8
    grouped = pairs >= experts
    blocks = -(-outputs // (_ROWS * _WARPS))
    (out,) = _kernel(inputs)(
        inputs=[x, weight, scales, scales if bias is None else bias, chosen],
        template=[
            ("T", x.dtype),
            ("IN", inputs),
            ("OUT", outputs),
            ("SHARED_BY", pairs // x.shape[0]),
            ("GROUPED", grouped),
            ("BIASED", bias is not None),
            ("ROWS", _ROWS),
            ("WARPS", _WARPS),
            ("AT_ONCE", _AT_ONCE),
            ("MOST_PAIRS", MOST_PAIRS),
        ],
        grid=(32, blocks * _WARPS, experts if grouped else pairs),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[(pairs, outputs)],
        output_dtypes=[x.dtype],
    )
    found: mx.array = out
    return found


@cache
def _kernel(inputs: int) -> Any:
    return mx.fast.cuda_kernel(
        name="darkbloom_mxfp4_rows",
        input_names=["x", "weight", "scales", "bias", "chosen"],
        output_names=["out"],
        source=_SOURCE,
        header=_HEADER,
        shared_memory=_AT_ONCE * inputs * 2,
    )
