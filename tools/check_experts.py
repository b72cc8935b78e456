"""Run experts and packed matrices in every way that this device has, beside float64 on the host; exit 1 where they differ.

    python tools/check_experts.py [--time] [--peers]

What runs where no test suite can: on a GPU machine without a network. With ``--time`` it
also times them, and with ``--peers`` mlx-lm's blocks and MLX's matrices beside them, whose
kernels MLX compiles for up to half a minute each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from darkbloom_core.experts import choose_experts, gated_experts, mix, packed_linear

MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
SHAPES = {"gpt-oss": (32, 4, 2880, 2880), "gemma-4": (128, 8, 2816, 704), "small": (5, 2, 64, 96)}
"""Experts, how many a token chooses, hidden and inner size."""
MATRICES = {
    "small": (192, 80),
    "query": (2816, 4096),
    "mlp": (2816, 2112),
    "mlp down": (2112, 2816),
    "head": (2816, 262144),
}
"""Inputs and outputs."""


class Product:
    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return up * gate


def main() -> None:
    wrong = 0
    for name, (experts, each, hidden, inner) in SHAPES.items():
        for packed in (False, True):
            if name != "small" and not packed:
                continue
            block = _block(experts, hidden, inner, packed)
            for count in (1, 2, 3, 8, 32, 64, 512):
                wrong += _differs(f"{name}{', mxfp4' if packed else ''}", block, count, each)
        if "--time" in sys.argv and name != "small":
            _time(name, block, each)
    for name, (inputs, outputs) in MATRICES.items():
        wrong += _matrix_differs(name, inputs, outputs)
    wrong += _choice_differs(128, 8) + _choice_differs(32, 4)
    sys.exit(1 if wrong else 0)


def _block(experts: int, hidden: int, inner: int, packed: bool) -> SwitchGLU:
    mx.random.seed(1)
    block = SwitchGLU(hidden, inner, experts, activation=Product(), bias=True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear: SwitchLinear = block[name]
        linear.weight = linear.weight.astype(mx.bfloat16)
        linear.bias = mx.random.normal(linear.bias.shape).astype(mx.bfloat16)
        if packed:
            block[name] = linear.to_quantized(**MXFP4)
    mx.eval(block.parameters())
    return block


def _asked(count: int, block: SwitchGLU, each: int) -> tuple[mx.array, mx.array]:
    chance = np.random.default_rng(count)
    hidden, experts = block.down_proj.weight.shape[-2], block.down_proj.weight.shape[0]
    chosen = np.stack([chance.permutation(experts)[:each] for _ in range(count)]).astype(np.uint32)
    return mx.array(chance.standard_normal((count, hidden))).astype(mx.bfloat16), mx.array(chosen)


def _differs(name: str, block: SwitchGLU, count: int, each: int) -> bool:
    tokens, chosen = _asked(count, block, each)
    found = np.array(gated_experts(block, tokens, chosen).astype(mx.float32), np.float64)
    again = all(
        np.array_equal(found, np.array(gated_experts(block, tokens, chosen).astype(mx.float32), np.float64))
        for _ in range(5)
    )
    first = gated_experts(block, tokens[:1], chosen[:1])
    alone = np.array_equal(np.array(first.astype(mx.float32), np.float64)[0], found[0])
    worst = 0.0
    for token in range(0, count, max(1, count // 2)):
        for place, expert in enumerate(chosen[token].tolist()[:2]):
            x = np.array(tokens[token].astype(mx.float32), np.float64)
            up, gate = _linear(block.up_proj, expert, x), _linear(block.gate_proj, expert, x)
            wanted = _linear(block.down_proj, expert, up * gate)
            worst = max(worst, float(np.abs(found[token, place] - wanted).max() / np.abs(wanted).max()))
    print(f"{name}, {count} tokens: off by {worst:.2%} of the largest, repeats {again}, as alone {alone}")
    return worst > 0.02 or not again


def _linear(part: SwitchLinear, expert: int, x: np.ndarray) -> np.ndarray:
    weight = part["weight"][expert]
    if "scales" in part:
        weight = mx.dequantize(weight, part["scales"][expert], **MXFP4)
    bias = np.array(part["bias"][expert].astype(mx.float32), np.float64)
    return np.array(weight.astype(mx.float32), np.float64) @ x + bias


def _matrix_differs(name: str, inputs: int, outputs: int) -> bool:
    mx.random.seed(2)
    linear = nn.Linear(inputs, outputs, bias=name == "small")
    linear.set_dtype(mx.bfloat16)
    linear = linear.to_quantized(**MXFP4)
    mx.eval(linear.parameters())
    plain = mx.dequantize(linear.weight, linear.scales, **MXFP4).astype(mx.float32)
    some = np.array(plain[: min(outputs, 2000)], np.float64)
    bias = np.array(linear.bias.astype(mx.float32), np.float64) if "bias" in linear else 0.0
    is_wrong = False
    for rows in (1, 2, 3, 8, 9, 17, 32, 40, 64, 100, 256, 512):
        x = mx.random.normal((rows, inputs)).astype(mx.bfloat16)
        found = packed_linear(linear, x)
        again = all(bool(mx.array_equal(found, packed_linear(linear, x))) for _ in range(3))
        wanted = np.array(x.astype(mx.float32), np.float64) @ some.T + bias
        off = np.abs(np.array(found[:, : some.shape[0]].astype(mx.float32), np.float64) - wanted).max()
        worst = off / np.abs(wanted).max()
        is_wrong |= bool(worst > 0.02) or not again
        said = f"{name}, {rows} rows: off by {worst:.2%}, repeats {again}"
        if "--time" in sys.argv:
            said += "; " + _beside(lambda x=x: packed_linear(linear, x), lambda x=x: linear(x), "MLX's")
        print(said, flush=True)
    return is_wrong


def _choice_differs(experts: int, count: int) -> bool:
    mx.random.seed(3)
    scores, scale = mx.random.normal((33, experts)).astype(mx.bfloat16), mx.random.uniform(shape=(experts,))
    outputs = mx.random.normal((33, count, 96)).astype(mx.bfloat16)
    chosen, shares = (np.array(each.astype(mx.float32)) for each in choose_experts(scores, count, scale))
    mixed = np.array(mix(outputs, mx.array(shares).astype(mx.bfloat16)).astype(mx.float32))
    wanted = np.array(scores.astype(mx.float32))
    largest = np.sort(wanted, -1)[:, -count:]
    taken = np.take_along_axis(wanted, chosen.astype(int), -1)
    weights = np.exp(taken) / np.exp(taken).sum(-1, keepdims=True) * np.array(scale)[chosen.astype(int)]
    sums = (np.array(outputs.astype(mx.float32)) * shares[..., None]).sum(1)
    off = (
        np.abs(np.sort(taken, -1) - largest).max(),
        np.abs(weights - shares).max(),
        np.abs(sums - mixed).max(),
    )
    print(
        f"choosing {count} of {experts}: scores off by {off[0]:.2g}, shares by {off[1]:.2g}, the mixture by {off[2]:.2g}"
    )
    return bool(off[0] > 0 or off[1] > 0.01 or off[2] > 0.05)


def _time(name: str, block: SwitchGLU, each: int) -> None:
    for count in (1, 4, 8, 32, 64, 256, 512, 2048):
        tokens, chosen = _asked(count, block, each)
        said = _beside(
            lambda t=tokens, c=chosen: gated_experts(block, t, c),
            lambda t=tokens, c=chosen: block(t, c),
            "mlx-lm's",
        )
        print(f"{name}, {count} tokens: {said}", flush=True)


def _beside(ours: Callable[[], mx.array], theirs: Callable[[], mx.array], whose: str) -> str:
    said = f"{_microseconds(ours):.0f} us"
    return f"{said}, {whose} {_microseconds(theirs):.0f} us" if "--peers" in sys.argv else said


def _microseconds(run: Callable[[], mx.array]) -> float:
    mx.eval(run())
    spent = []
    for _ in range(7):
        start = time.perf_counter()
        mx.eval([run() for _ in range(10)])
        spent.append((time.perf_counter() - start) / 10 * 1e6)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
