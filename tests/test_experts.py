"""Experts: each token through the experts that it chose, however many there are and however they are packed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU

from darkbloom_core.experts import choose_experts, gated_experts, mix, packed_linear
from darkbloom_core.experts._mxfp4_cuda import mxfp4_product, serves

EXPERTS, HIDDEN, INNER = 5, 64, 96
PACKINGS = {
    "plain": None,
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "affine": {"group_size": 32, "bits": 8, "mode": "affine"},
}


class Activation(Module):
    """Tells up from gate."""

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return mx.tanh(gate) * (up + 1)


def experts_of(packing: str, *, bias: bool) -> SwitchGLU:
    mx.random.seed(3)
    block = SwitchGLU(HIDDEN, INNER, EXPERTS, activation=Activation(), bias=bias)
    for name in ("gate_proj", "up_proj", "down_proj"):
        if bias:
            block[name].bias = mx.random.normal(block[name].bias.shape)
        if PACKINGS[packing]:
            block[name] = block[name].to_quantized(**PACKINGS[packing])
    return block


def one_by_one(block: SwitchGLU, tokens: mx.array, chosen: mx.array) -> np.ndarray:
    """The same, a pair at a time, by numpy in float64."""

    def linear(name: str, expert: int, x: np.ndarray) -> np.ndarray:
        part = block[name]
        weight = part["weight"][expert]
        if "scales" in part:
            offsets = part.get("biases")
            weight = mx.dequantize(
                weight,
                part["scales"][expert],
                None if offsets is None else offsets[expert],
                group_size=part.group_size,
                bits=part.bits,
                mode=part.mode,
            ).astype(mx.float32)
        product = x @ np.array(weight, np.float64).T
        return product + np.array(part["bias"][expert], np.float64) if "bias" in part else product

    out = np.zeros((*chosen.shape, HIDDEN))
    for token, asked in enumerate(chosen.tolist()):
        x = np.array(tokens[token], np.float64)
        for place, expert in enumerate(asked):
            up, gate = linear("up_proj", expert, x), linear("gate_proj", expert, x)
            out[token, place] = linear("down_proj", expert, np.tanh(gate) * (up + 1))
    return out


@pytest.mark.parametrize("unpack", [None, True])
@pytest.mark.parametrize("count", [1, 7, 40], ids=["one-token", "unsorted", "sorted"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_token_goes_through_its_experts(packing, bias, count, unpack) -> None:
    block = experts_of(packing, bias=bias)
    tokens = mx.random.normal((count, HIDDEN))
    chosen = mx.array(np.stack([np.random.default_rng(row).permutation(EXPERTS)[:2] for row in range(count)]))
    found = np.array(gated_experts(block, tokens, chosen, unpack=unpack))
    assert found.shape == (count, 2, HIDDEN)
    np.testing.assert_allclose(found, one_by_one(block, tokens, chosen), rtol=2e-4, atol=2e-4)


def test_rows_of_a_gathered_matmul_have_plain_strides(monkeypatch) -> None:
    """What the rows' dimension of size 1 must not have is the stride that a bias leaves behind."""
    seen = []

    def recorded(real):
        def call(rows, *others, **named):
            mx.eval(rows)
            seen.append(memoryview(rows).strides[-2:])
            return real(rows, *others, **named)

        return call

    monkeypatch.setattr(mx, "gather_mm", recorded(mx.gather_mm))
    block = experts_of("plain", bias=True)
    chosen = mx.array([[0, 1], [4, 2]] * 40)
    mx.eval(gated_experts(block, mx.random.normal((80, HIDDEN)), chosen))
    assert seen == [(HIDDEN * 4, 4), (HIDDEN * 4, 4), (INNER * 4, 4)]


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"mode": "affine"}, False),
        ({"dtype": mx.float32}, False),
        ({"inputs": 16_416}, False),
    ],
)
def test_the_kernel_for_packed_matrices_is_asked_only_for_what_it_can_do(change, served) -> None:
    case = {"mode": "mxfp4", "dtype": mx.bfloat16, "inputs": 16_384} | change
    packing = {"group_size": 32, "bits": 4, "mode": case["mode"]}
    weight = mx.zeros((2, 2880, case["inputs"] // 8), mx.uint32)
    x = mx.zeros((1, case["inputs"]), case["dtype"])
    assert serves(x, weight, packing) is served


def test_rows_that_an_activation_left_in_another_dtype_are_refused() -> None:
    """Their bits would be read as others."""
    with pytest.raises(TypeError, match="float32"):
        mxfp4_product(mx.zeros((2, 64)), mx.zeros((8, 8), mx.uint32), mx.zeros((8, 2), mx.uint8))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_largest_scores_are_chosen_and_shared_by_their_softmax(scaled) -> None:
    scores, scale = mx.random.normal((7, EXPERTS)), mx.array([1.0, 2.0, 0.5, 3.0, 1.5])
    chosen, shares = (np.array(each) for each in choose_experts(scores, 3, scale if scaled else None))
    plain = np.array(scores)
    taken = np.take_along_axis(plain, chosen.astype(int), -1)
    np.testing.assert_array_equal(np.sort(taken), np.sort(plain)[:, -3:])
    wanted = np.exp(taken) / np.exp(taken).sum(-1, keepdims=True)
    np.testing.assert_allclose(shares, wanted * (np.array(scale)[chosen] if scaled else 1), rtol=1e-5)


def test_outputs_are_mixed_by_their_shares() -> None:
    outputs, shares = mx.random.normal((4, 3, 6)), mx.random.uniform(shape=(4, 3))
    wanted = np.einsum("tkh,tk->th", np.array(outputs), np.array(shares))
    np.testing.assert_allclose(np.array(mix(outputs, shares)), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_gives_what_its_unpacked_weights_give(bias) -> None:
    layer = nn.Linear(HIDDEN, INNER, bias=bias)
    packed = layer.to_quantized(**PACKINGS["mxfp4"])
    plain = mx.dequantize(packed.weight, packed.scales, **PACKINGS["mxfp4"]).astype(mx.float32)
    x = mx.random.normal((2, 3, HIDDEN))
    wanted = np.array(x) @ np.array(plain).T + (np.array(layer.bias) if bias else 0)
    np.testing.assert_allclose(np.array(packed_linear(packed, x)), wanted, rtol=1e-4, atol=1e-4)
    table = nn.Embedding(INNER, HIDDEN)
    np.testing.assert_allclose(
        np.array(packed_linear(table, x)), np.array(x) @ np.array(table.weight).T, rtol=1e-4, atol=1e-4
    )
