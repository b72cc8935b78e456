"""Pictures and videos: patches as the publisher's processor makes them, and logits as the reference computes them.

Prompts run through the engine's caches, cut as the engine cuts them.
"""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from darkbloom_gemma4._processor import Processor, read_processor
from darkbloom_gemma4._vision_config import read_vision

from darkbloom_core.contracts import Chat, MediaEmbeddings, MediaPart, MediaSpan, Message, TextPart
from darkbloom_core.engine import KvStore, step_batch
from darkbloom_core.engine._scheduler import chunk_end
from darkbloom_core.errors import InvalidRequest, UnsupportedCheckpoint

STRIDE = 997
CLOSE = 1e-4
"""What logits may differ from the reference's float32; the promise is 1e-3."""


def sixteen(most):
    return Processor(patch_pixels=16, pooling=3, image_tokens=most, frame_tokens=70)


@pytest.mark.parametrize("most", [70, 280])
def test_patches_are_those_of_the_publishers_processor(most, checkpoints, golden):
    reference, processor = golden("processor"), sixteen(most)
    for number, (height, width) in enumerate(checkpoints.PHOTOGRAPHS):
        picture = processor.prepare(checkpoints.photograph(height, width), video=False)
        columns, rows = reference[f"grid{number} {most}"]
        assert picture.soft_tokens == columns * rows // 9 <= most
        assert picture.soft_tokens == np.prod(processor.cells(height, width, video=False))
        grid = [(column, row) for row in range(rows) for column in range(columns)]
        assert picture.arrays["positions"].tolist() == [list(place) for place in grid]
        values = picture.arrays["patches"].reshape(-1)[::STRIDE] * np.float32(1 / 255)
        assert np.abs(values - reference[f"values{number} {most}"]).max() <= 1e-6


def test_a_frame_has_its_own_limit():
    processor = sixteen(280)
    assert processor.cells(480, 480, video=False) == (16, 16)
    assert processor.cells(480, 480, video=True) == (8, 8)


def test_a_prepared_picture_takes_what_was_said(checkpoints):
    processor = sixteen(70)
    picture = processor.prepare(checkpoints.photograph(97, 311), video=True)
    assert (
        sum(array.nbytes for array in picture.arrays.values())
        == picture.soft_tokens * processor.soft_token_bytes
    )


def test_digests_tell_pictures_apart_and_nothing_else(checkpoints):
    processor = sixteen(70)
    red, blue = checkpoints.square("red", "white"), checkpoints.square("blue", "white")
    digests = [
        processor.prepare(pixels, video=video).digest for pixels in (red, blue) for video in (False, True)
    ]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert sixteen(280).prepare(red, video=False).digest != digests[0]
    wide = processor.prepare(np.zeros((48, 96, 3), np.uint8), video=False)
    tall = processor.prepare(np.zeros((96, 48, 3), np.uint8), video=False)
    assert wide.digest != tall.digest


@pytest.fixture
def vision(checkpoints, family, demo_folder):
    from darkbloom_gemma4._fields import Fields

    config = read_vision(Fields(json.loads((demo_folder / "config.json").read_text())))
    assert config is not None
    return config


def test_settings_come_from_the_checkpoint_and_else_from_the_publisher(vision, demo_folder, tmp_path):
    assert read_processor(demo_folder, vision) == Processor(
        patch_pixels=16, pooling=3, image_tokens=70, frame_tokens=70, frames=8
    )
    assert read_processor(tmp_path, vision) == Processor(
        patch_pixels=16, pooling=3, image_tokens=280, frame_tokens=70, frames=32
    )
    (tmp_path / "preprocessor_config.json").write_text('{"max_soft_tokens": 560, "resample": 2}')
    (tmp_path / "video_preprocessor_config.json").write_text('{"num_frames": 16, "resample": 2}')
    found = read_processor(tmp_path, vision)
    assert (found.image_tokens, found.frame_tokens, found.frames, found.resample) == (560, 70, 16, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patch_size", 14), ("pooling_kernel_size", 2), ("do_resize", False), ("do_rescale", False),
        ("rescale_factor", 0.1), ("resample", 9), ("max_soft_tokens", 0),
    ],
)  # fmt: skip
def test_settings_that_would_make_other_patches_are_refused(name, value, vision, tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {name: value}}))
    with pytest.raises(UnsupportedCheckpoint, match=name):
        read_processor(tmp_path, vision)


def test_another_mean_is_refused_where_it_would_count(vision, tmp_path):
    settings = {"image_mean": [0.5, 0.5, 0.5], "do_normalize": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    read_processor(tmp_path, vision)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "do_normalize": True}))
    with pytest.raises(UnsupportedCheckpoint, match="image_mean"):
        read_processor(tmp_path, vision)


def run(model, ids, spans, embeddings, grid):
    """Logits ``[tokens, vocabulary]``; chunks are cut on ``grid``, layers run one at a time."""
    layers = model.description.layers
    store = KvStore(layers, max_rows=1)
    row, done, logits = store.open_row(len(ids), len(ids) + 1), 0, []
    while done < len(ids):
        end = chunk_end(done, len(ids), grid, spans)
        here = tuple(span for span in spans if done <= span.start < end)
        assert all(span.start + span.length <= end for span in here)
        batch = step_batch(store, [row], [done], end - done, here)
        moved = tuple(MediaSpan(span.start - done, span.length, span.picture) for span in here)
        media = MediaEmbeddings(moved, tuple(embeddings[span.picture] for span in here))
        inputs = model.embed(mx.array([ids[done:end]], mx.int32), media)
        for index in range(len(layers)):
            inputs = model.run_layers(inputs, batch, index, index + 1)
        new = model.logits(inputs[0].swapaxes(0, 1))
        mx.eval(new)
        logits.append(np.array(new.astype(mx.float32)))
        done = end
    return np.concatenate(logits)


def looked(seam, picture):
    inputs = seam.start(picture)
    for layer in range(seam.tower_layers):
        inputs = seam.run_layers(inputs, layer, layer + 1)
    return seam.finish(inputs)


@pytest.mark.parametrize("grid", [5, *(pytest.param(grid, marks=pytest.mark.soak) for grid in (16, 1000))])
def test_logits_with_pictures_agree_with_the_reference_however_the_prompt_is_cut(
    grid, checkpoints, random_checkpoint, load, golden
):
    """One picture, several, touching ones, some longer than the window, frames, and inputs per layer."""
    for name, (checkpoint, parts) in checkpoints.MEDIA_PROMPTS.items():
        model = load(random_checkpoint(checkpoint, "publisher"))
        ids, places, kinds = checkpoints.media_prompt(parts)
        patches, positions = checkpoints.pictures(tuple(size for _, size in kinds))
        soft = np.array(model.tower(mx.array(patches), mx.array(positions)))
        spans = tuple(MediaSpan(*place, number) for number, place in enumerate(places))
        embeddings = [mx.array(soft[span.picture][: span.length]) for span in spans]
        found = run(model, ids, spans, embeddings, grid)
        assert np.abs(found - golden("media")[name]).max() <= CLOSE, name


def test_a_layer_of_the_tower_in_parts_is_the_whole_layer(checkpoints, random_checkpoint, load):
    """Parts are of patches, which do not divide evenly; the numbers are the same up to rounding."""
    tower = load(random_checkpoint(next(iter(checkpoints.MEDIA_PROMPTS.values()))[0], "publisher")).tower
    patches, positions = (mx.array(each) for each in checkpoints.pictures(((5, 7),)))
    whole = (tower.embed(patches, positions), positions)
    (wanted, _), found = tower.run_parts(whole, None, 0, tower.layer_count, 1), whole
    for part in range(8 * tower.layer_count):
        found = tower.run_parts(found, None, part, part + 1, 8)
        assert (len(found) == 2) is ((part + 1) % 8 == 0)
    assert np.abs(np.array(found[0]) - np.array(wanted)).max() < CLOSE


def as_parts(seam, checkpoints, media):
    """The parts and the prepared pictures of one of ``DEMO_MEDIA``."""
    parts, pictures = [], []
    for one in media:
        frames = one if isinstance(one, list) else [(None, *one)]
        video = isinstance(one, list)
        made = [seam.prepare(checkpoints.square(*colours), video=video) for _, *colours in frames]
        seconds = tuple(float(second) for second, *_ in frames) if video else ()
        tokens = tuple(picture.soft_tokens for picture in made)
        parts.append(MediaPart("video" if video else "image", tokens, seconds))
        pictures += made
    return parts, pictures


FILLER = (
    "The old baker walked to the market. A young pilot painted a ladder in the garden. My doctor sold the "
    "violin before the storm. Every farmer found a lantern on Monday. The tall singer forgot the umbrella. "
)


@pytest.mark.parametrize(
    "name",
    ["mixed"]
    + [
        pytest.param(name, marks=pytest.mark.soak)
        for name in ("in the middle", "one image", "two images", "video")
    ],
)
def test_the_demo_sees_what_the_reference_sees(name, checkpoints, family, demo_folder, load, golden):
    """The whole way: the codec's ids, the processor's patches, the tower, and logits of the engine's own chunks."""
    model, reference = load(demo_folder), golden("demo_media")
    seam, codec = model.vision, family.codec(demo_folder, model.description)
    question, media = checkpoints.DEMO_MEDIA[name]
    parts, pictures = as_parts(seam, checkpoints, media)
    pieces = re.split(r"\{\}", question.replace("{filler}", FILLER * 4))
    content = [TextPart(pieces[0])] if pieces[0] else []
    for part, text in zip(parts, pieces[1:], strict=True):
        content += [part, TextPart(text)] if text else [part]
    prompt = codec.encode_chat(Chat(messages=(Message(role="user", content=tuple(content)),)))
    if name != "in the middle":  # there the template trims the text beside the picture
        assert list(prompt.ids) == reference[f"ids {name}"].tolist()
    ids = reference[f"ids {name}"].tolist()
    starts = [place + 1 for place, token in enumerate(ids) if token == checkpoints.BEGIN]
    spans = tuple(MediaSpan(start, pictures[n].soft_tokens, n) for n, start in enumerate(starts))
    embeddings = [looked(seam, picture) for picture in pictures]
    found = run(model, ids, spans, embeddings, 256)[reference[f"positions {name}"]]
    assert np.abs(found - reference[f"logits {name}"]).max() <= CLOSE


def test_a_shape_without_pixels_is_refused():
    with pytest.raises(InvalidRequest):
        sixteen(70).cells(0, 5, video=False)
