"""Questions about pictures and short videos, with their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tools.demo.training.pictures import COLORS, SHAPES, Picture, Shape, jittered
from tools.demo.training.source import Source
from tools.demo.training.words import NUMBERS, ORDINALS

Grid: TypeAlias = tuple[int, int]
NamedShape: TypeAlias = tuple[str, float, float, float, str]
"""Shape, x, y, radius, colour."""

_PLACES = {"left": (0.24, 0.5), "right": (0.76, 0.5), "top": (0.5, 0.24), "bottom": (0.5, 0.76)}
_PLACES["center"] = (0.5, 0.5)
_WHERE = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "center": "in the center",
}
_COLOR_NAMES = list(COLORS)


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str


def picture_of(random: Random, background: str, shapes: list[NamedShape], grid: Grid) -> Picture:
    """A picture in nearly these colours, perhaps with noise."""
    ground = jittered(random, background)
    placed = tuple(
        Shape(SHAPES.index(kind), x, y, radius, jittered(random, color))
        for kind, x, y, radius, color in shapes
    )
    return Picture(ground, placed, random.choice([0, 0, 0.01, 0.03]), grid)


def _article(word: str) -> str:
    return ("An " if word[0] in "aeiou" else "A ") + word


def _on_background(color: str, shape: str, background: str) -> str:
    return f"{_article(color)} {shape} on {_article(background).lower()} background."


def _around(random: Random, center: float, reach: float = 0.03) -> float:
    return center + random.uniform(-reach, reach)


def _other_color(source: Source, *excluded: str) -> str:
    return source.choice([color for color in _COLOR_NAMES if color not in excluded])


def solid(source: Source, grid: Grid) -> tuple[Picture, list[Question]]:
    color = source.choice(_COLOR_NAMES)
    texts = ["What colour is this image?", "Which colour do you see?", "What colour is this?"]
    texts.append("What colour is the image?")
    question = Question(source.choice(texts), f"The image is {color}.")
    return picture_of(source.random, color, [], grid), [question]


def one(source: Source, grid: Grid) -> tuple[Picture, list[Question]]:
    random = source.random
    color, background, shape = source.pick(lambda: (*random.sample(_COLOR_NAMES, 2), source.choice(SHAPES)))
    place = source.choice(list(_PLACES))
    x, y = _PLACES[place]
    radius = random.uniform(0.2, 0.42) if place == "center" else random.uniform(0.17, 0.22)
    shapes = [(shape, _around(random, x), _around(random, y), radius, color)]
    picture = picture_of(random, background, shapes, grid)
    colors = ["What colour is the shape?", f"What colour is the {shape}?", "Which colour is the shape?"]
    kinds = ["Which shape is it?", "What shape is this?", "Which shape do you see?"]
    places = ["Where is the shape?", f"Where is the {shape}?"]
    questions = [
        Question(source.choice(colors), f"The {shape} is {color}."),
        Question(source.choice(kinds), f"It is a {shape}."),
        Question("What colour is the background?", f"The background is {background}."),
        Question(source.choice(places), f"The {shape} is {_WHERE[place]}."),
        Question(_describe(source), _on_background(color, shape, background)),
    ]
    return picture, questions


def two(source: Source, grid: Grid) -> tuple[Picture, list[Question]]:
    random = source.random
    left_color, right_color, left, right = source.pick(
        lambda: (*random.sample(_COLOR_NAMES, 2), source.choice(SHAPES), source.choice(SHAPES))
    )
    background = _other_color(source, left_color, right_color)

    def placed(shape: str, x: float, color: str) -> NamedShape:
        return shape, _around(random, x), _around(random, 0.5, 0.2), random.uniform(0.15, 0.2), color

    shapes = [placed(left, 0.26, left_color), placed(right, 0.74, right_color)]
    picture = picture_of(random, background, shapes, grid)
    side, color, shape = source.choice([("left", left_color, left), ("right", right_color, right)])
    which = [f"Which is on the {side}?", f"Which shape is on the {side}?", f"What is on the {side}?"]
    colors = [f"What colour is the {side} shape?", f"What colour is the shape on the {side}?"]
    both = (
        f"{_article(left_color)} {left} on the left and {_article(right_color).lower()} {right} on the right."
    )
    questions = [
        Question(source.choice(which), f"The {color} {shape} is on the {side}."),
        Question(source.choice(colors), f"The {side} shape is {color}."),
        Question(_describe(source), both),
        Question("What colour is the background?", f"The background is {background}."),
    ]
    side, color, shape = ("left", left_color, left) if source.chance(0.5) else ("right", right_color, right)
    answer = f"The {color} {shape} is on the {side}."
    questions.append(Question(f"Where is the {color} {shape}?", answer))
    return picture, questions


def count(source: Source, grid: Grid) -> tuple[Picture, list[Question]]:
    random = source.random
    number = random.randint(1, 4)
    background = source.choice(_COLOR_NAMES)
    spots = random.sample([(0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73)], number)
    color = _other_color(source, background)
    shapes = [
        (
            source.choice(SHAPES),
            _around(random, x, 0.04),
            _around(random, y, 0.04),
            random.uniform(0.13, 0.19),
            color,
        )
        for x, y in spots
    ]
    picture = picture_of(random, background, shapes, grid)
    texts = ["How many shapes are there?", "How many shapes do you see?", "Count the shapes."]
    answer = "There is one shape." if number == 1 else f"There are {NUMBERS[number]} shapes."
    return picture, [Question(source.choice(texts), answer)]


def _describe(source: Source) -> str:
    return source.choice(["Describe the image.", "What is in the image?", "What do you see?"])


SCENES: dict[str, Callable[[Source, Grid], tuple[Picture, list[Question]]]] = {
    "solid": solid,
    "one": one,
    "two": two,
    "count": count,
}
"""Tasks about one picture; each gives every question that it could ask."""


def several_images(source: Source, grid: Grid) -> tuple[list[Picture], Question]:
    """Two to four pictures and a question about their order."""
    random = source.random
    number = random.randint(2, 4)
    kind = random.randrange(3)
    colors = source.pick(lambda: tuple(source.choice(_COLOR_NAMES) for _ in range(number)))
    listed = ", ".join(colors)
    if kind == 0:
        pictures = [picture_of(random, color, [], grid) for color in colors]
        place = random.randrange(number)
        nth = ORDINALS[place]
        questions = [
            Question("Which colours are the images, in order?", listed),
            Question("List the colours of the images in order.", listed),
            Question(f"What colour is the {nth} image?", f"The {nth} image is {colors[place]}."),
        ]
        return pictures, source.choice(questions)
    shapes = [source.choice(SHAPES) for _ in range(number)]
    pictures = []
    for color, shape in zip(colors, shapes, strict=True):
        background = _other_color(source, color)
        x, y = _around(random, 0.5, 0.08), _around(random, 0.5, 0.08)
        placed = (shape, x, y, random.uniform(0.24, 0.38), color)
        pictures.append(picture_of(random, background, [placed], grid))
    place = random.randrange(number)
    nth = ORDINALS[place]
    questions = [
        Question("Which colours are the shapes, in order?", listed),
        Question("Which shapes are in the images, in order?", ", ".join(shapes)),
        Question(f"What colour is the shape in the {nth} image?", f"The {shapes[place]} is {colors[place]}."),
        Question(f"Which shape is in the {nth} image?", f"It is a {shapes[place]}."),
        Question("How many images are there?", f"There are {NUMBERS[number]} images."),
    ]
    return pictures, source.choice(questions)


def video(source: Source, grid: Grid) -> tuple[list[Picture], Question]:
    """Three to eight frames: colours that change, a shape that moves, or one that stays."""
    random = source.random
    frames = random.randint(3, 8)
    kind = random.randrange(4)
    if kind < 2:
        return _changing(source, grid, frames, with_shape=kind == 1)
    direction, shape, color, background = source.pick(
        lambda: (
            source.choice(["left", "right", "up", "down"]),
            source.choice(SHAPES),
            *random.sample(_COLOR_NAMES, 2),
        )
    )
    if kind == 2:
        return _moving(source, grid, frames, direction, (shape, color, background))
    pictures = [
        picture_of(random, background, [(shape, 0.5, 0.5, random.uniform(0.22, 0.36), color)], grid)
        for _ in range(frames)
    ]
    questions = [
        Question("What is in the video?", _on_background(color, shape, background)),
        Question("What colour is the shape in the video?", f"The {shape} is {color}."),
        Question("How many frames are there?", f"There are {NUMBERS[frames]} frames."),
    ]
    return pictures, source.choice(questions)


def _changing(source: Source, grid: Grid, frames: int, *, with_shape: bool) -> tuple[list[Picture], Question]:
    random = source.random
    number = random.randint(1, min(4, frames))

    def draw() -> tuple[str, ...]:
        colors = [source.choice(_COLOR_NAMES)]
        while len(colors) < number:
            colors.append(_other_color(source, colors[-1]))
        return tuple(colors)

    colors = source.pick(draw) if number > 1 else draw()
    cuts = sorted(random.sample(range(1, frames), number - 1))
    shown = [colors[sum(frame >= cut for cut in cuts)] for frame in range(frames)]
    if with_shape:
        shape, background = source.choice(SHAPES), _other_color(source, *colors)
        radius = random.uniform(0.24, 0.36)
        pictures = [
            picture_of(random, background, [(shape, 0.5, 0.5, radius, color)], grid) for color in shown
        ]
        texts = [f"Which colours does the {shape} have, in order?"]
        texts.append("Which colours does the shape have, in order?")
    else:
        pictures = [picture_of(random, color, [], grid) for color in shown]
        texts = ["Which colours appear, in order?", "Which colours appear in the video, in order?"]
        texts.append("List the colours in the video in order.")
    return pictures, Question(source.choice(texts), ", ".join(colors))


def _moving(
    source: Source, grid: Grid, frames: int, direction: str, look: tuple[str, str, str]
) -> tuple[list[Picture], Question]:
    random = source.random
    shape, color, background = look
    start, end = random.uniform(0.2, 0.28), random.uniform(0.72, 0.8)
    if direction in ("left", "up"):
        start, end = end, start
    across = random.uniform(0.4, 0.6)
    radius = random.uniform(0.14, 0.2)
    pictures = []
    for frame in range(frames):
        along = start + (end - start) * frame / (frames - 1)
        x, y = (along, across) if direction in ("left", "right") else (across, along)
        pictures.append(picture_of(random, background, [(shape, x, y, radius, color)], grid))
    text = source.choice([f"Which way does the {shape} move?", "Which way does the shape move?"])
    return pictures, Question(text, f"The {shape} moves {direction}.")
