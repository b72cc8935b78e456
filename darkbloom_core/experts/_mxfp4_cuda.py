"""CUDA kernels for products with MXFP4 matrices, of one matrix or of many experts, on the tensor cores.

A block holds some outputs of one matrix and reads their weights once for up to 64 of the
rows that go through it. Always true: how an output's products are summed depends on the
shapes of a call alone, so a row's bits depend neither on the other rows nor on which
experts they chose.

MXFP4 (OCP Microscaling Formats 1.0): 32 values of 4 bits, e2m1, share a scale of 8 bits,
e8m0. MLX packs eight values into a word, the first in the lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

SCANNED_PAIRS = 512
"""Up to so many pairs of a row and an expert each block looks for its own; of more, a kernel before makes lists."""

MOST_INPUTS = 16_384
"""Inputs of a matrix: scales of a block's outputs stay in shared memory."""

MOST_SHARED_OUTPUTS = 100_000
"""Up to so many outputs, of all matrices in use, the warps of a block share each."""

_WARPS = 4
_GROUPS = (128, 256, MOST_INPUTS // 32)  # of an output's scales, there is room for
_STATIC_BYTES = 4 * (SCANNED_PAIRS + 1 + 64)

_HEADER = """
// Eight bfloat16 of one word of weights: pairs of the values (0, 4), (1, 5), (2, 6) and (3, 7), each times the scale.
__device__ inline void unpack(unsigned int bits, unsigned int scale, unsigned int (&pairs)[4]) {
  // Sign, two bits of exponent and one of fraction, put where a bfloat16 has them: 2^-126 of the value.
  pairs[0] = ((bits & 0x00070007u) << 6) | ((bits & 0x00080008u) << 12);
  pairs[1] = ((bits & 0x00700070u) << 2) | ((bits & 0x00800080u) << 8);
  pairs[2] = ((bits & 0x07000700u) >> 2) | ((bits & 0x08000800u) << 4);
  pairs[3] = ((bits & 0x70007000u) >> 6) | (bits & 0x80008000u);
  #pragma unroll
  for (int at = 0; at < 4; at++) {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pairs[at]) : "r"(0x7e807e80u), "r"(0x80008000u));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pairs[at]) : "r"(scale), "r"(0x80008000u));
  }
}

// A scale, twice, as bfloat16.
__device__ inline unsigned int both(unsigned char exponent) {
  const unsigned int one = exponent == 0 ? 0x40u : (unsigned int)exponent << 7;
  return one | (one << 16);
}

__device__ inline void multiply(
    float (&sums)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
    unsigned int b0, unsigned int b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Sixteen bytes, or zeros.
__device__ inline void bring(void* to, const void* from, bool is_there) {
  const unsigned int place = (unsigned int)__cvta_generic_to_shared(to);
  const int bytes = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(place), "l"(from), "r"(bytes));
}
"""

_PRODUCT = """
  // Warps: OVER of them share the outputs, DEEP of them the inputs. A thread of a warp is at
  // (near, word): its outputs are near and near + 8, its rows 2 * word and 2 * word + 1 of eight.
  constexpr int ROWS = EIGHTS * 8, OUTPUTS = OVER * 16, THREADS = OVER * DEEP * 32;
  constexpr int X_CHUNKS = DEEP * EIGHTS * 128, W_CHUNKS = OVER * DEEP * 64;  // of 16 bytes, in a stage
  extern __shared__ uint4 shared[];
  __shared__ int mine[LISTED ? 1 : SCANNED_PAIRS];
  __shared__ int tally, source[ROWS];
  const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;
  const int near = lane >> 2, word = lane & 3, over = warp % OVER, deep = warp / OVER;
  const int outputs = weight_shape[weight_ndim - 2], groups = weight_shape[weight_ndim - 1] / 4;
  const int rows = x_shape[0], pairs = GATHERED ? chosen_shape[0] : rows;
  const int shared_by = pairs / rows;
  const int expert = !GATHERED ? 0 : LEADING ? (int)chosen[blockIdx.z] : (int)blockIdx.z;
  int begin = GATHERED ? 0 : blockIdx.z * ROWS, count = GATHERED ? 0 : min(pairs, begin + ROWS) - begin;
  const unsigned int* list = order;
  if (LISTED) {
    begin = starts[expert];
    count = starts[expert + 1] - begin;
  } else if (GATHERED) {
    if (warp == 0) {
      int so_far = 0;
      for (int from = 0; from < pairs; from += 32) {
        const bool is_mine = from + lane < pairs && chosen[from + lane] == expert;
        const unsigned int who = __ballot_sync(0xffffffffu, is_mine);
        if (is_mine) mine[so_far + __popc(who & ((1u << lane) - 1u))] = from + lane;
        so_far += __popc(who);
      }
      if (lane == 0) tally = so_far;
    }
    __syncthreads();
    count = tally;
    if (LEADING && mine[0] != blockIdx.z) return;  // the first pair of an expert looks after all of them
  }
  if (count == 0) return;
  auto pair_at = [&](int at) { return LISTED ? (int)list[begin + at] : GATHERED ? mine[at] : begin + at; };

  const int first = blockIdx.y * OUTPUTS;
  const uint4* w = reinterpret_cast<const uint4*>(weight) + (long)expert * outputs * groups;
  unsigned char* exponents = reinterpret_cast<unsigned char*>(shared + STAGES * (X_CHUNKS + W_CHUNKS));
  {
    const unsigned char* s = scales + (long)expert * outputs * groups;
    for (int at = thread; at < OUTPUTS * groups; at += THREADS) {
      const int output = min(first + at / groups, outputs - 1);
      exponents[at] = s[(long)output * groups + at % groups];
    }
  }
  const int stages = (groups + 4 * DEEP - 1) / (4 * DEEP);

  for (int from = 0; from < count; from += ROWS) {
    const int now = min(ROWS, count - from);
    auto load = [&](int stage) {
      uint4* xs = shared + (stage % STAGES) * (X_CHUNKS + W_CHUNKS);
      uint4* ws = xs + X_CHUNKS;
      for (int chunk = thread; chunk < X_CHUNKS; chunk += THREADS) {
        // [DEEP][EIGHTS][4 groups][8 rows][4 words]: what a warp reads at once lies side by side.
        const int row = ((chunk >> 7) % EIGHTS) * 8 + ((chunk >> 2) & 7);
        const int group = (stage * DEEP + (chunk >> 7) / EIGHTS) * 4 + ((chunk >> 5) & 3);
        const bool is_there = row < now && group < groups;
        const long place = is_there ? ((long)source[row] * groups + group) * 4 + (chunk & 3) : 0;
        bring(xs + chunk, reinterpret_cast<const uint4*>(x) + place, is_there);
      }
      for (int chunk = thread; chunk < W_CHUNKS; chunk += THREADS) {
        // [DEEP][OVER][16 outputs][4 groups], the groups of an output in an order that keeps reads off one bank.
        const int of_warp = chunk >> 6, row = (chunk >> 2) & 15, at = chunk & 3;
        const int group = (stage * DEEP + of_warp / OVER) * 4 + (at ^ ((row >> 1) & 3));
        const int output = min(first + (of_warp % OVER) * 16 + row, outputs - 1);
        const bool is_there = group < groups;
        bring(ws + chunk, w + (is_there ? (long)output * groups + group : 0), is_there);
      }
    };
    float sums[EIGHTS][4] = {};
    __syncthreads();  // nobody reads the last rows' stages
    if (thread < now) source[thread] = pair_at(from + thread) / shared_by;
    __syncthreads();  // that is there, and so are the scales
    #pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
      if (stage < stages) load(stage);
      asm volatile("cp.async.commit_group;");
    }
    for (int stage = 0; stage < stages; stage++) {
      asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2));
      __syncthreads();
      if (stage + STAGES - 1 < stages) load(stage + STAGES - 1);
      asm volatile("cp.async.commit_group;");
      const uint4* xs = shared + (stage % STAGES) * (X_CHUNKS + W_CHUNKS);
      const unsigned int* ws = reinterpret_cast<const unsigned int*>(xs + X_CHUNKS) + (deep * OVER + over) * 256;
      xs += deep * EIGHTS * 128;
      #pragma unroll
      for (int part = 0; part < 4; part++) {
        const int group = min((stage * DEEP + deep) * 4 + part, groups - 1);
        const int at = (near * 4 + (part ^ ((near >> 1) & 3))) * 4 + word;
        const unsigned char* e = exponents + (over * 16 + near) * groups + group;
        unsigned int upper[4], lower[4];
        unpack(ws[at], both(e[0]), upper);
        unpack(ws[at + 128], both(e[8 * groups]), lower);
        #pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
          const uint4 four = xs[(eight * 4 + part) * 32 + lane];
          multiply(
              sums[eight], upper[0], lower[0], upper[1], lower[1],
              __byte_perm(four.x, four.z, 0x5410), __byte_perm(four.x, four.z, 0x7632));
          multiply(
              sums[eight], upper[2], lower[2], upper[3], lower[3],
              __byte_perm(four.y, four.w, 0x5410), __byte_perm(four.y, four.w, 0x7632));
        }
      }
    }
    if (DEEP > 1) {
      float* parts = reinterpret_cast<float*>(shared);
      asm volatile("cp.async.wait_group 0;");
      __syncthreads();
      if (deep > 0) {
        #pragma unroll
        for (int at = 0; at < EIGHTS * 4; at++)
          parts[(((deep - 1) * OVER + over) * EIGHTS * 4 + at) * 32 + lane] = sums[at >> 2][at & 3];
      }
      __syncthreads();
      if (deep == 0) {
        #pragma unroll
        for (int other = 0; other < DEEP - 1; other++) {
          #pragma unroll
          for (int at = 0; at < EIGHTS * 4; at++)
            sums[at >> 2][at & 3] += parts[((other * OVER + over) * EIGHTS * 4 + at) * 32 + lane];
        }
      }
    }
    if (deep == 0) {
      #pragma unroll
      for (int eight = 0; eight < EIGHTS; eight++) {
        #pragma unroll
        for (int at = 0; at < 4; at++) {
          const int row = eight * 8 + word * 2 + (at & 1), output = first + over * 16 + near + (at >> 1) * 8;
          if (row < now && output < outputs) {
            float sum = sums[eight][at];
            if (BIASED) sum += static_cast<float>(bias[(long)expert * outputs + output]);
            out[(long)pair_at(from + row) * outputs + output] = static_cast<T>(sum);
          }
        }
      }
    }
  }
"""

_LISTS = """
  // A block for each expert: where its pairs begin, and which they are, in their own order.
  __shared__ int before[8], own[8];
  const int lane = threadIdx.x, warp = threadIdx.y, expert = blockIdx.y, pairs = chosen_shape[0];
  const int each = ((pairs + 255) / 256) * 32, from = warp * each, end = min(pairs, from + each);
  int lower = 0, equal = 0;
  for (int at = from + lane; at < end; at += 32) {
    lower += chosen[at] < expert;
    equal += chosen[at] == expert;
  }
  #pragma unroll
  for (int apart = 16; apart; apart >>= 1) {
    lower += __shfl_xor_sync(0xffffffffu, lower, apart);
    equal += __shfl_xor_sync(0xffffffffu, equal, apart);
  }
  if (lane == 0) {
    before[warp] = lower;
    own[warp] = equal;
  }
  __syncthreads();
  int start = 0;
  for (int other = 0; other < 8; other++) start += before[other];
  if (warp == 0 && lane == 0) {
    starts[expert] = start;
    if (expert == gridDim.y - 1) starts[expert + 1] = pairs;
  }
  for (int other = 0; other < warp; other++) start += own[other];
  for (int at = from; at < end; at += 32) {
    const bool is_mine = at + lane < end && chosen[at + lane] == expert;
    const unsigned int who = __ballot_sync(0xffffffffu, is_mine);
    if (is_mine) order[start + __popc(who & ((1u << lane) - 1u))] = at + lane;
    start += __popc(who);
  }
"""


def serves(x: mx.array, weight: mx.array, packing: dict[str, Any]) -> bool:
    """Whether ``mxfp4_product`` can do it. ``weight`` is ``[..., out, in / 8]``."""
    return (
        packing == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        and x.dtype == mx.bfloat16
        and weight.shape[-1] * 8 <= MOST_INPUTS
    )


@dataclass(frozen=True, slots=True)
class ExpertLists:
    """The pairs of a row and an expert, for every product of a block.

    ``chosen`` is ``[P]`` uint32. ``order`` ``[P]`` has the pairs of each expert, one expert
    after the other, and ``starts`` ``[E + 1]`` where each begins, if ``are_made``; else anything.
    """

    chosen: mx.array
    order: mx.array
    starts: mx.array
    are_made: bool

    @classmethod
    def of(cls, chosen: mx.array, experts: int) -> ExpertLists:
        """On CUDA only. ``chosen`` ``[P]`` uint32 are of ``experts``."""
        if chosen.shape[0] <= SCANNED_PAIRS:
            return cls(chosen, chosen, chosen, are_made=False)
        order, starts = _list_kernel()(
            inputs=[chosen],
            template=[],
            grid=(32, 8 * experts, 1),
            threadgroup=(32, 8, 1),
            output_shapes=[chosen.shape, (experts + 1,)],
            output_dtypes=[mx.uint32, mx.uint32],
        )
        return cls(chosen, order, starts, are_made=True)


def mxfp4_product(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    bias: mx.array | None = None,
    lists: ExpertLists | None = None,
) -> mx.array:
    """Rows by one matrix, or by the experts that each chose, plus the bias: ``[R, out]`` or ``[P, out]`` bfloat16.

    ``x`` is ``[R, in]`` bfloat16; ``weight`` ``[out, in / 8]`` uint32, ``scales`` ``[out, in / 32]``
    uint8 and ``bias`` ``[out]``. With ``lists`` of P pairs, a multiple of R, these have a
    dimension of experts in front, and row r has the pairs from ``r * P / R`` on.
    On CUDA only; see ``serves``. Raises ``TypeError`` for rows of another dtype.
    """
    if x.dtype != mx.bfloat16:
        raise TypeError(f"rows for an MXFP4 product are {x.dtype}, not bfloat16")
    rows, (outputs, words) = x.shape[0], weight.shape[-2:]
    if lists is None:
        pairs, matrices = rows, 1
        order = [weight, weight, weight]  # which it does not look at
    else:
        pairs, matrices = lists.chosen.shape[0], weight.shape[0]
        order = [lists.chosen, lists.order, lists.starts]
    eights, over, stages = _shape(-(-pairs // matrices), outputs * min(pairs, matrices))
    leading = lists is not None and pairs < matrices
    deep = _WARPS // over
    (out,) = _product(_shared_bytes(eights, over, deep, stages, words // 4))(
        inputs=[x, weight, scales, scales if bias is None else bias, *order],
        template=[
            ("T", x.dtype),
            ("GATHERED", lists is not None),
            ("LISTED", lists is not None and lists.are_made),
            ("LEADING", leading),
            ("BIASED", bias is not None),
            ("EIGHTS", eights),
            ("OVER", over),
            ("DEEP", deep),
            ("STAGES", stages),
            ("SCANNED_PAIRS", SCANNED_PAIRS),
            ("MOST_GROUPS", next(each for each in _GROUPS if words // 4 <= each)),  # a kernel of its own
        ],
        grid=(
            32,
            -(-outputs // (16 * over)) * _WARPS,
            -(-rows // (8 * eights)) if lists is None else min(pairs, matrices),
        ),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[(pairs, outputs)],
        output_dtypes=[x.dtype],
    )
    found: mx.array = out
    return found


def _shape(rows: int, outputs: int) -> tuple[int, int, int]:
    """For so many rows a matrix, and outputs of all matrices in use: eights of rows in a block, warps over its outputs, stages."""
    if rows > 40:
        return 8, 4, 2
    if rows > 8:
        return 4, 4, 3
    # Few blocks read memory faster if each output's inputs are shared among the warps.
    return 1, 1 if outputs < MOST_SHARED_OUTPUTS else 4, 3


def _shared_bytes(eights: int, over: int, deep: int, stages: int, groups: int) -> int:
    """Of shared memory that a block asks for.

    MLX allows a kernel what it asks for when it is first used, and only if that is over
    48,000 bytes; so one kernel always asks for the same, whatever the matrix.
    """
    room = 16 * over * next(each for each in _GROUPS if groups <= each)
    needed = 16 * stages * (deep * eights * 128 + over * deep * 64) + room
    return needed if needed + _STATIC_BYTES <= 48_000 else max(needed, 48_001)


@cache
def _without_comments(source: str) -> str:
    """MLX hashes the source at each call, so it is short."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


@cache
def _product(shared_bytes: int) -> Any:
    return mx.fast.cuda_kernel(
        name="darkbloom_mxfp4_product",
        input_names=["x", "weight", "scales", "bias", "chosen", "order", "starts"],
        output_names=["out"],
        source=_without_comments(_PRODUCT),
        header=_without_comments(_HEADER),
        shared_memory=shared_bytes,
    )


@cache
def _list_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="darkbloom_expert_lists",
        input_names=["chosen"],
        output_names=["order", "starts"],
        source=_LISTS,
    )
