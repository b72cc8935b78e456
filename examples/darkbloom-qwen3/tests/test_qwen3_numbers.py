"""The logits are those of ``transformers`` in float32, in every layout, whole and token by token."""

import itertools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from darkbloom_core.engine import KvStore, step_batch

LAYOUTS = ("transformers", "publisher", "mlx")
TOLERANCE = 1e-5
"""Of the largest logit."""


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parent / "golden" / "logits.npz") as file:
        return dict(file)


def run(model, ids, pieces):
    """Logits ``[tokens, vocabulary]`` of ``ids``, cut into ``pieces``, through the engine's own KV storage."""
    layers = len(model.description.layers)
    store = KvStore(model.description.layers, max_rows=1)
    row = store.open_row(len(ids), len(ids))
    logits, done = [], 0
    for length in pieces:
        batch = step_batch(store, [row], [done], length)
        inputs = model.embed(mx.array([ids[done : done + length]], mx.int32))
        for index in range(layers):  # one by one, as a long prompt may be run
            inputs = model.run_layers(inputs, batch, index, index + 1)
        hidden = inputs[0].reshape(length, 1, -1)
        logits.append(model.logits(hidden))
        mx.eval(inputs, logits[-1])
        done += length
    return np.concatenate([np.array(each) for each in logits])


def assert_agree(logits, golden, layout):
    tokens = len(logits)
    kept = golden["positions"] < tokens
    reference = golden[f"{layout}_logits"]
    largest = np.abs(reference[kept]).max()
    difference = np.abs(logits[golden["positions"][kept]] - reference[kept]).max()
    assert difference <= TOLERANCE * largest
    assert (logits.argmax(-1) == golden[f"{layout}_choices"][:tokens]).all()


@pytest.mark.parametrize(
    ("layout", "tokens"), [*itertools.product(LAYOUTS, [1, 255, 256, 257]), ("transformers", 1300)]
)  # layouts differ in loading only, so one of them goes all the way
def test_whole_prompts_agree_with_the_reference(layout, tokens, checkpoints, folder, load, golden):
    ids = checkpoints.prompt()[:tokens]
    assert_agree(run(load(folder(layout)), ids, [tokens]), golden, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_token_by_token_agree_with_the_reference(layout, checkpoints, folder, load, golden):
    ids = checkpoints.prompt()[:257]
    assert_agree(run(load(folder(layout)), ids, [1] * 257), golden, layout)


def test_tokens_after_a_long_prompt_agree_with_the_reference(checkpoints, folder, load, golden):
    ids = checkpoints.prompt()
    assert_agree(run(load(folder("transformers")), ids, [1200] + [1] * 100), golden, "transformers")


def test_a_prompt_in_chunks_agrees_with_the_reference(checkpoints, folder, load, golden):
    ids = checkpoints.prompt()
    assert_agree(run(load(folder("transformers")), ids, [256] * 5 + [20]), golden, "transformers")


def test_rows_of_one_batch_stand_at_their_own_positions(checkpoints, folder, load):
    model = load(folder("transformers"))
    prompts = [checkpoints.prompt()[:7], checkpoints.prompt()[20:60]]
    store = KvStore(model.description.layers, max_rows=2)
    rows = [store.open_row(64, 64) for _ in prompts]
    layers = len(model.description.layers)
    for row, ids in zip(rows, prompts, strict=True):
        batch = step_batch(store, [row], [0], len(ids) - 1)
        out = model.run_layers(model.embed(mx.array([ids[:-1]], mx.int32)), batch, 0, layers)
        mx.eval(out)
    batch = step_batch(store, rows, [len(ids) - 1 for ids in prompts], 1)
    last = mx.array([[ids[-1]] for ids in prompts], mx.int32)
    together = np.array(model.logits(model.run_layers(model.embed(last), batch, 0, layers)[0]))
    for logits, ids in zip(together, prompts, strict=True):
        np.testing.assert_allclose(logits, run(model, ids, [len(ids)])[-1], atol=1e-4)
