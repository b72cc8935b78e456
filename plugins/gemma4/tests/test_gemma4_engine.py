"""Random checkpoints in the engine with pictures and frames: what is reused, who runs beside whom, and who fails alone."""

import json

import numpy as np
import pytest
from darkbloom_gemma4._processor import Processor
from toy_engine import GREEDY, request, wait_for
from toy_family import text_of
from warm import NumberCodec, Warm, bits_equal

from darkbloom_core.contracts import Device, MediaSpan, Placement, PreparedPicture, Prompt
from darkbloom_core.engine import GenerationRequest, PlainParser
from darkbloom_core.errors import GenerationFailed

CPU = Device("cpu")
SMALL = Processor(patch_pixels=16, pooling=3, image_tokens=25, frame_tokens=16)
"""Pictures of few soft tokens: what is tested is how many there are."""


@pytest.fixture(scope="module")
def engine(family, random_checkpoint):
    """An engine of a random checkpoint, made once."""
    made = {}

    def engine(name):
        if name not in made:
            folder = random_checkpoint(name, "publisher")
            description = family.describe(json.loads((folder / "config.json").read_text()), CPU)
            model = family.load(folder, description, Placement(CPU))
            options = {"max_rows": 8, "picture_bytes": 1 << 20, "slice_seconds": 60.0}
            made[name] = Warm(model, codec=NumberCodec(description.vocab_size), engine=options)
        return made[name]

    yield engine
    for each in made.values():
        each.engine.close()


def conversation(checkpoints, seed, parts, tail):
    """Ids, spans and pictures: (text tokens, "image" or "video") in turn, and ``tail`` tokens of text."""
    random, ids, spans, pictures = np.random.default_rng(seed), [2], [], []

    def text(length):
        return random.integers(len(checkpoints.CONTROL_TOKENS), checkpoints.VOCABULARY, length).tolist()

    for length, kind in parts:
        pixels = random.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        picture = SMALL.prepare(pixels, video=kind == "video")
        ids += [*text(length), checkpoints.BEGIN]
        spans.append(MediaSpan(len(ids), picture.soft_tokens, len(spans)))
        ids += [checkpoints.IMAGE if kind == "image" else checkpoints.VIDEO] * picture.soft_tokens
        ids.append(checkpoints.END)
        pictures.append(picture)
    return [*ids, *text(tail)], tuple(spans), tuple(pictures)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=pytest.mark.soak)
        for name, count in (("edge", 13), ("moe", 30), ("dense", 30))
    ],
)
def test_a_follow_up_question_about_many_pictures_computes_none_of_them_again(
    name, count, engine, checkpoints
):
    """Also with inputs per layer, and layers that borrow."""
    warm = engine(name)
    parts = [(number % 5 + 3, "video" if number % 3 == 2 else "image") for number in range(count)]
    ids, spans, pictures = conversation(checkpoints, 1, parts, 30)
    media = {"spans": spans, "pictures": pictures}
    first = warm.run(ids, 3, **media)
    last_chunk = first.chunks[-1][0]
    assert sum(start % 256 > 0 for start, _ in first.chunks) > count / 10, "pictures move the ends of chunks"
    assert len(ids) - last_chunk <= 256
    question = [*ids, *first.tokens, *ids[-20:]]
    ran, cold = warm.run(question, 3, **media), warm.run_cold(question, 3, **media)
    assert ran.cached == last_chunk
    assert ran.chunks == [chunk for chunk in cold.chunks if chunk[0] >= last_chunk]
    assert bits_equal(ran, cold)
    same_size = next(one for one in pictures if one.soft_tokens == pictures[-1].soft_tokens)
    other = warm.run(ids, 1, spans=spans, pictures=(*pictures[:-1], same_size))
    assert other.cached <= spans[-1].start
    assert warm.is_at_rest()


def asked(name, ids, most, spans=(), pictures=()):
    return GenerationRequest(
        id=name,
        prompt=Prompt(tuple(ids), tuple(spans)),
        parser=PlainParser(),
        max_tokens=most,
        sampling=GREEDY,
        pictures=tuple(pictures),
        scope=name,
    )


def test_rows_of_text_images_and_videos_get_together_what_each_gets_alone(engine, checkpoints):
    warm = engine("edge")
    kinds = {"text": [], "image": [(9, "image")] * 2, "video": [(4, "video")] * 3}
    requests = [
        asked(kind, *_with_most(conversation(checkpoints, number, parts, 40 + number), 12))
        for number, (kind, parts) in enumerate(kinds.items())
    ]
    alone = [text_of(warm.engine.submit(each)) for each in requests]
    streams = [warm.engine.submit(each) for each in requests]
    assert [text_of(list(stream)) for stream in streams] == alone
    assert warm.engine.status().largest_batch == len(requests)


def _with_most(made, most):
    ids, spans, pictures = made
    return ids, most, spans, pictures


def test_a_picture_that_the_tower_cannot_take_ends_its_own_request_alone(engine, checkpoints):
    warm = engine("edge")
    ids, spans, pictures = conversation(checkpoints, 7, [(9, "video"), (5, "image")], 20)
    arrays = {**pictures[1].arrays, "patches": pictures[1].arrays["patches"][:, :-1]}
    broken = (pictures[0], PreparedPicture(pictures[1].soft_tokens, arrays, b"broken"))
    good = [asked("good", ids, 12, spans, pictures), request("text", ids[-20:], 12)]
    alone = [text_of(warm.engine.submit(each)) for each in good]
    streams = [warm.engine.submit(each) for each in (good[0], asked("bad", ids, 12, spans, broken), good[1])]
    outputs = [list(stream) for stream in streams]
    assert isinstance(outputs[1][-1].error, GenerationFailed)
    assert [text_of(outputs[0]), text_of(outputs[2])] == alone
    wait_for(warm.is_at_rest)
