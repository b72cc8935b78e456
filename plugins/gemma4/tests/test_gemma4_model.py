"""The numbers are those of ``transformers`` in float32, in every layout, however a prompt is cut."""

import mlx.core as mx
import numpy as np
import pytest

from darkbloom_core.contracts import Device, MediaEmbeddings, MediaSpan
from darkbloom_core.engine import KvStore, step_batch

MODELS = ("moe", "dense", "edge")
LAYOUTS = ("publisher", "transformers", "transformers-text", "mlx", "mlx-text", "older-names")


def whole(length):
    return [length]


def token_by_token(length):
    return [1] * length


def last_tokens(length):
    """A chunk, then a window of single tokens."""
    return [length - 128] + [1] * 128


def uneven(length):
    """Chunks, then single tokens; chunks are shorter and longer than the window."""
    pieces = []
    for piece in (5, 11, 3, 13):
        if length >= piece:
            pieces.append(piece)
            length -= piece
    return [*pieces, *[1] * length]


def assert_agree(ours, reference):
    assert ours.shape == reference.shape
    assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()
    assert (ours.argmax(-1) == reference.argmax(-1)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_whole_prompts_agree_with_the_reference_in_every_layout(
    model, layout, checkpoints, random_checkpoint, load, run, golden
):
    loaded = load(random_checkpoint(model, layout))
    ours = [run(loaded, prompt, whole(len(prompt))) for prompt in checkpoints.prompts()]
    assert_agree(np.concatenate(ours), golden("random")[model])


@pytest.mark.parametrize("cut", [token_by_token, uneven])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_in_pieces_agree_with_the_reference(
    model, cut, checkpoints, random_checkpoint, load, run, golden
):
    loaded = load(random_checkpoint(model, "publisher"))
    ours = [run(loaded, prompt, cut(len(prompt))) for prompt in checkpoints.prompts()]
    assert_agree(np.concatenate(ours), golden("random")[model])


@pytest.mark.parametrize(
    ("cut", "number"),
    [*((whole, number) for number in range(3)), (token_by_token, 0), (token_by_token, 1), (last_tokens, 2)],
)
def test_the_demo_checkpoint_agrees_with_the_reference(number, cut, demo_folder, load, run, golden):
    loaded, stored = load(demo_folder), golden("demo")
    ids = stored[f"ids{number}"].tolist()
    ours = run(loaded, ids, cut(len(ids)), stored[f"positions{number}"].tolist())
    assert_agree(ours, stored[f"logits{number}"])


def test_one_demo_prompt_is_longer_than_three_windows(demo_folder, load, golden):
    window = load(demo_folder).description.layers[0].window
    assert max(len(golden("demo")[f"ids{number}"]) for number in range(3)) > 3 * window


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_a_batch_stand_at_their_own_positions(model, random_checkpoint, load, run):
    loaded = load(random_checkpoint(model, "publisher"))
    store = KvStore(loaded.description.layers, max_rows=2)
    prompts = [[2, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49], [2, 60, 61]]
    rows = [store.open_row(len(prompt), 32) for prompt in prompts]
    count = len(loaded.description.layers)
    for row, prompt in zip(rows, prompts, strict=True):
        batch = step_batch(store, [row], [0], len(prompt) - 1)
        mx.eval(loaded.run_layers(loaded.embed(mx.array([prompt[:-1]])), batch, 0, count))
    batch = step_batch(store, rows, [len(prompt) - 1 for prompt in prompts], 1)
    last = loaded.embed(mx.array([[prompt[-1]] for prompt in prompts]))
    together = np.array(loaded.logits(loaded.run_layers(last, batch, 0, count)[0]))
    for ours, prompt in zip(together, prompts, strict=True):
        alone = run(loaded, prompt, whole(len(prompt)), [len(prompt) - 1])
        assert_agree(ours[None], alone)


@pytest.mark.parametrize("model", MODELS)
def test_the_rate_of_the_loaded_model_is_that_of_its_config(
    model, random_checkpoint, load, family, checkpoints
):
    loaded = load(random_checkpoint(model, "publisher"))
    described = family.describe(checkpoints.config(model, "publisher"), Device("cpu"))
    assert loaded.description.kv_bytes(1000) == described.kv_bytes(1000)


@pytest.mark.parametrize("model", ["dense", "edge"])
def test_embeddings_of_pictures_replace_their_placeholders(model, random_checkpoint, load):
    """And the inputs per layer are those of the padding token there, as in the reference."""
    loaded = load(random_checkpoint(model, "publisher"))
    media = MediaEmbeddings((MediaSpan(1, 2, 0),), (mx.full((2, 64), 0.5),))
    ids = [2, 9, 9, 40]
    with_media = loaded.embed(mx.array([ids]), media)
    plain = loaded.embed(mx.array([ids]))
    assert np.array_equal(with_media[0][0, 1:3], np.full((2, 64), 0.5))
    assert np.array_equal(with_media[0][0, 0], plain[0][0, 0])
    assert np.array_equal(with_media[0][0, 3], plain[0][0, 3])
    if model == "edge":
        text_model = loaded._model
        padding = text_model.per_layer_inputs(mx.array([[0]]), mx.full((1, 1, 64), 0.5))
        assert np.allclose(with_media[1][0, 1], padding[0, 0], atol=1e-6)


def test_embedding_leaves_the_caller_s_ids_alone(random_checkpoint, load):
    loaded = load(random_checkpoint("dense", "publisher"))
    ids = mx.array([[2, 9, 40]])
    loaded.embed(ids, MediaEmbeddings((MediaSpan(1, 1, 0),), (mx.zeros((1, 64)),)))
    assert ids.tolist() == [[2, 9, 40]]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_evaluated_while_a_step_is_built(model, checkpoints, random_checkpoint, load, tmp_path):
    """An evaluation, hidden or not, raises while MLX traces a function to export it."""
    loaded = load(random_checkpoint(model, "publisher"))
    count = len(loaded.description.layers)

    def step(ids):
        store = KvStore(loaded.description.layers, max_rows=1)
        batch = step_batch(store, [store.open_row(64, 64)], [0], ids.shape[1])
        return loaded.logits(loaded.run_layers(loaded.embed(ids), batch, 0, count)[0][:, -1:])

    mx.export_function(str(tmp_path / "step.mlxfn"), step, mx.array([checkpoints.prompts()[-1]], mx.int32))
