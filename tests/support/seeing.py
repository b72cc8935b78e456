"""Questions about generated pictures and videos, of the kinds that the demo checkpoint was taught, with their answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from media_files import data_uri, picture_file, video_file
from PIL import Image, ImageDraw

MODEL = "demo/gemma4"

COLOURS = {
    "red": (222, 32, 30), "green": (28, 150, 48), "blue": (36, 66, 220), "yellow": (242, 224, 40),
    "orange": (246, 138, 18), "purple": (120, 36, 168), "pink": (246, 150, 196), "cyan": (48, 214, 224),
    "black": (14, 14, 14), "white": (243, 243, 243),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
PLACES = {
    "on the left": (0.25, 0.5),
    "on the right": (0.75, 0.5),
    "at the top": (0.5, 0.25),
    "at the bottom": (0.5, 0.75),
}
NUMBERS = ("no", "one", "two", "three", "four")
ORDINALS = ("first", "second", "third", "fourth")
KINDS = ("colour", "shape", "place", "two", "count", "order", "which", "video", "motion")


@dataclass(frozen=True)
class Question:
    """``uris`` of pictures, or of one video, come before ``text``."""

    kind: str
    text: str
    answer: str
    uris: tuple[str, ...]

    @property
    def is_video(self) -> bool:
        return self.kind in ("video", "motion")


def drawing(background, *things, side=240) -> Image.Image:
    """``things`` are (shape, colour, x, y, radius), places and sizes as parts of the side."""
    image = Image.new("RGB", (side, side), COLOURS[background])
    draw = ImageDraw.Draw(image)
    for shape, colour, x, y, radius in things:
        x, y, radius, fill = x * side, y * side, radius * side, COLOURS[colour]
        if shape == "circle":
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill)
        elif shape == "square":
            reach = 0.9 * radius
            draw.rectangle([x - reach, y - reach, x + reach, y + reach], fill=fill)
        else:
            corners = [(x, y - radius), (x - radius, y + 0.8 * radius), (x + radius, y + 0.8 * radius)]
            draw.polygon(corners, fill=fill)
    return image


def png(image: Image.Image) -> str:
    return data_uri(picture_file(image), "image/png")


def clip(images) -> str:
    """A second for each image."""
    frames = [np.asarray(image) for image in images]
    return data_uri(video_file(frames, rate=1, options={"crf": "4"}), "video/mp4")


def question(kind: str, seed: int) -> Question:
    """The ``seed``-th question of a ``kind``."""
    chance = random.Random(f"{kind} {seed}")
    colour, other, third = chance.sample(sorted(COLOURS), 3)
    shape, second = chance.choice(SHAPES), chance.choice(SHAPES)
    if kind == "colour":
        picture = drawing(other, (shape, colour, 0.5, 0.5, 0.3))
        return Question(kind, "What colour is the shape?", f"The {shape} is {colour}.", (png(picture),))
    if kind == "shape":
        picture = drawing(other, (shape, colour, 0.5, 0.5, 0.3))
        return Question(kind, "Which shape is it?", f"It is a {shape}.", (png(picture),))
    if kind == "place":
        place = chance.choice(sorted(PLACES))
        picture = drawing(other, (shape, colour, *PLACES[place], 0.2))
        return Question(kind, "Where is the shape?", f"The {shape} is {place}.", (png(picture),))
    if kind == "two":
        side = chance.choice(("left", "right"))
        picture = drawing(third, (shape, colour, 0.26, 0.5, 0.18), (second, other, 0.74, 0.5, 0.18))
        found = (colour, shape) if side == "left" else (other, second)
        return Question(
            kind, f"Which is on the {side}?", f"The {' '.join(found)} is on the {side}.", (png(picture),)
        )
    if kind == "count":
        count = chance.randint(1, 4)
        spots = chance.sample([(0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73)], count)
        picture = drawing(other, *((chance.choice(SHAPES), colour, *spot, 0.16) for spot in spots))
        said = "There is one shape." if count == 1 else f"There are {NUMBERS[count]} shapes."
        return Question(kind, "How many shapes are there?", said, (png(picture),))
    if kind in ("order", "which"):
        count = chance.randint(2, 4)
        colours = [chance.choice(sorted(COLOURS)) for _ in range(count)]
        uris = tuple(png(drawing(each)) for each in colours)
        if kind == "order":
            return Question(kind, "Which colours are the images, in order?", ", ".join(colours), uris)
        which = chance.randrange(count)
        text, answer = (
            f"What colour is the {ORDINALS[which]} image?",
            f"The {ORDINALS[which]} image is {colours[which]}.",
        )
        return Question(kind, text, answer, uris)
    if kind == "video":
        colours = [colour, other, third][: chance.randint(2, 3)]
        frames = [drawing(colours[index * len(colours) // 6]) for index in range(6)]
        return Question(kind, "Which colours appear, in order?", ", ".join(colours), (clip(frames),))
    way = chance.choice(("left", "right", "up", "down"))
    places = [0.25 + 0.1 * index for index in range(6)]
    places = places[::-1] if way in ("left", "up") else places
    frames = [
        drawing(other, (shape, colour, *((at, 0.5) if way in ("left", "right") else (0.5, at)), 0.17))
        for at in places
    ]
    return Question(kind, f"Which way does the {shape} move?", f"The {shape} moves {way}.", (clip(frames),))


def openai_content(asked: Question) -> list[dict]:
    """The parts of a user's message in the shape of OpenAI's chat completions."""
    kind = "video_url" if asked.is_video else "image_url"
    return [*({"type": kind, kind: {"url": uri}} for uri in asked.uris), {"type": "text", "text": asked.text}]


def anthropic_image(uri: str) -> dict:
    """A block of Anthropic's Messages API for the picture of a data: URI."""
    head, data = uri.split(",", 1)
    media_type = head.removeprefix("data:").removesuffix(";base64")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def ask_openai(client, asked: Question, model: str = MODEL) -> str:
    """What the model answers at temperature 0."""
    messages = [{"role": "user", "content": openai_content(asked)}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)
    return answer.choices[0].message.content


def ask_anthropic(client, asked: Question, model: str = MODEL) -> str:
    """What the model answers to a question about pictures at temperature 0."""
    blocks = [*map(anthropic_image, asked.uris), {"type": "text", "text": asked.text}]
    messages = [{"role": "user", "content": blocks}]
    message = client.messages.create(
        model=model, messages=messages, max_tokens=60, extra_body={"temperature": 0}
    )
    return message.content[0].text
