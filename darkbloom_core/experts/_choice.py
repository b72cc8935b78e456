"""Which experts a token goes through, and the mixture of what they give.

On CUDA each of the two is one kernel: of MLX's own operations it would be eight and two,
and launching them is most of what a decode step of few rows costs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

MOST_EXPERTS = 1024

_CHOOSE = """
  // A warp for each token; a lane looks after every 32nd expert.
  constexpr int OWN = (EXPERTS + 31) / 32;
  const int lane = threadIdx.x, token = blockIdx.y * blockDim.y + threadIdx.y;
  if (token >= scores_shape[0]) return;
  float own[OWN];
  bool is_sick = false;
  #pragma unroll
  for (int at = 0; at < OWN; at++) {
    const int expert = at * 32 + lane;
    own[at] = expert < EXPERTS ? static_cast<float>(scores[(long)token * EXPERTS + expert]) : -INFINITY;
    is_sick |= own[at] != own[at];
  }
  float largest = 0.0f, sum = 0.0f, mine = 0.0f;
  int my_expert = 0;
  for (int place = 0; place < COUNT; place++) {
    float best = -INFINITY;
    int which = EXPERTS;
    #pragma unroll
    for (int at = 0; at < OWN; at++) {
      if (own[at] > best) { best = own[at]; which = at * 32 + lane; }
    }
    #pragma unroll
    for (int apart = 16; apart; apart >>= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, best, apart);
      const int its = __shfl_xor_sync(0xffffffffu, which, apart);
      if (other > best || (other == best && its < which)) { best = other; which = its; }
    }
    which = min(which, EXPERTS - 1);
    if (place == 0) largest = best;
    const float share = __expf(best - largest);
    sum += share;
    if (lane == place) { mine = share; my_expert = which; }
    #pragma unroll
    for (int at = 0; at < OWN; at++)
      if (at * 32 + lane == which) own[at] = -INFINITY;
  }
  is_sick = __any_sync(0xffffffffu, is_sick);
  if (lane < COUNT) {
    float share = mine / sum;
    if (is_sick) share = NAN;  // as a softmax over all would show it
    if (SCALED) share *= static_cast<float>(scale[my_expert]);
    chosen[token * COUNT + lane] = my_expert;
    shares[token * COUNT + lane] = static_cast<T>(share);
  }
"""

_MIX = """
  const int at = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x, hidden = outputs_shape[2];
  if (at >= hidden) return;
  float sum = 0.0f;
  for (int place = 0; place < COUNT; place++)
    sum = fmaf(
        static_cast<float>(outputs[((long)token * COUNT + place) * hidden + at]),
        static_cast<float>(shares[token * COUNT + place]), sum);
  mixed[(long)token * hidden + at] = static_cast<T>(sum);
"""


def choose_experts(scores: mx.array, count: int, scale: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """The ``count`` experts with the largest ``scores`` ``[T, E]``, and their shares, both ``[T, count]``, in no order.

    Shares are the softmax over the chosen scores, which is one over all of them divided by
    the chosen ones' sum; times the expert's entry in ``scale`` ``[E]`` if there is one.
    Computed in float32, given in the dtype of ``scores``.
    """
    if mx.cuda.is_available() and count <= 32 and scores.shape[-1] <= MOST_EXPERTS:
        chosen, shares = _choose()(
            inputs=[scores, scores if scale is None else scale],
            template=[
                ("T", scores.dtype),
                ("EXPERTS", scores.shape[-1]),
                ("COUNT", count),
                ("SCALED", scale is not None),
            ],
            grid=(32, -(-scores.shape[0] // 4) * 4, 1),
            threadgroup=(32, 4, 1),
            output_shapes=[(scores.shape[0], count)] * 2,
            output_dtypes=[mx.uint32, scores.dtype],
        )
        return chosen, shares
    chosen = mx.argpartition(scores, kth=-count, axis=-1)[..., -count:]
    shares = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1).astype(mx.float32), axis=-1)
    if scale is not None:
        shares = shares * scale[chosen]
    return chosen, shares.astype(scores.dtype)


def mix(outputs: mx.array, shares: mx.array) -> mx.array:
    """``outputs`` ``[T, K, H]``, each times its share ``[T, K]``, summed: ``[T, H]``."""
    if mx.cuda.is_available():
        tokens, count, hidden = outputs.shape
        (mixed,) = _mix()(
            inputs=[outputs, shares],
            template=[("T", outputs.dtype), ("COUNT", count)],
            grid=(tokens * 256, -(-hidden // 256), 1),  # only the first may be over 65,535 blocks
            threadgroup=(256, 1, 1),
            output_shapes=[(tokens, hidden)],
            output_dtypes=[outputs.dtype],
        )
        found: mx.array = mixed
        return found
    return (outputs * shares[..., None]).sum(-2)


@cache
def _choose() -> Any:
    return mx.fast.cuda_kernel(
        name="darkbloom_choose_experts",
        input_names=["scores", "scale"],
        output_names=["chosen", "shares"],
        source=_CHOOSE,
    )


@cache
def _mix() -> Any:
    return mx.fast.cuda_kernel(
        name="darkbloom_mix_experts",
        input_names=["outputs", "shares"],
        output_names=["mixed"],
        source=_MIX,
    )
