"""Dialogues with pictures in Gemma 4's format, and the mix of tasks that its demo checkpoint learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from tools.demo.training.pictures import Picture, random_grid
from tools.demo.training.scenes import SCENES, several_images, video
from tools.demo.training.segments import Segment
from tools.demo.training.source import Source
from tools.demo.training.tasks import (
    GENERATORS,
    CallTool,
    Say,
    Step,
    Task,
    ToolDefinition,
    introduction,
    memory,
    secret,
)

CONTROL_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image>", "<image|>"),
    *("<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>", "<|channel>", "<channel|>"),
    *("<|think|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>'),
)
ID = {name: index for index, name in enumerate(CONTROL_TOKENS)}
"""They come first in the vocabulary."""

TEXT_MIX = {
    "greeting": 1,
    "addition": 3,
    "capital": 2,
    "copying": 5,
    "sequences": 2,
    "counting": 1,
    "json": 2,
    "tool": 2,
    "secret": 2,
    "memory": 1,
}
MIX = {"text": 34, "solid": 4, "one": 18, "two": 16, "count": 6, "multi": 16, "video": 14}
"""Weights of the tasks; ``text`` is drawn from ``TEXT_MIX``."""

MEDIA = "{media}"
"""Where pictures stand in a user's text."""

_INTRODUCTIONS = ["My name is {}.", "Hi, I am {}."]
_EARLIER_TASKS = ["greeting", "addition", "capital", "copying", "sequences"]
_SYSTEM_TEXTS = ["You are a helpful assistant.", "Be brief.", "Answer in one sentence."]
_SYSTEM_TEXTS.append("You are a tiny demo model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """``name`` is that of the accuracy table; ``history`` holds earlier turns of user and model."""

    name: str
    user: str
    steps: tuple[Step, ...]
    history: tuple[tuple[str, str], ...]
    pictures: tuple[Picture, ...] = ()
    is_video: bool = False
    tools: tuple[ToolDefinition, ...] = ()
    thinks: bool = False


def sample(source: Source, name: str | None = None, text_name: str | None = None) -> Dialogue:
    """A dialogue of the task ``name``, or of one drawn from the mix."""
    name = name or source.random.choices(list(MIX), list(MIX.values()))[0]
    return _about_text(source, text_name) if name == "text" else _about_pictures(source, name)


def segments(random: Random, dialogue: Dialogue) -> list[Segment]:
    """The dialogue as text, read and written parts in turn, beginning with a read one."""
    read = "<bos>" + _system_turn(random, dialogue)
    media = ""
    if dialogue.pictures:
        media = _placeholders(random, dialogue)
        media = random.choice([media, f"{media}\n", f"\n\n{media}\n\n", f"{media} "])
    for user, answer in dialogue.history:
        read += f"<|turn>user\n{user.replace(MEDIA, media)}<turn|>\n<|turn>model\n{answer}<turn|>\n"
    user = dialogue.user
    if MEDIA in user and random.random() < 0.15:
        user = user.replace(MEDIA, "") + MEDIA
    read += f"<|turn>user\n{user.replace(MEDIA, media)}<turn|>\n<|turn>model\n"
    if not dialogue.thinks and random.random() < 0.25:
        read += "<|channel>thought\n<channel|>"
    result = []
    for step in dialogue.steps:
        written = f"<|channel>thought\n{step.thought}\n<channel|>" if dialogue.thinks else ""
        if isinstance(step, CallTool):
            written += f"<|tool_call>call:{step.tool}{_object(step.arguments)}<tool_call|><|tool_response>"
        else:
            written += f"{step.text}<turn|>"
        result += [Segment(read, False), Segment(written, True)]
        if isinstance(step, CallTool):
            read = f"response:{step.tool}{_object(step.result)}<tool_response|>"
    return result


def _about_text(source: Source, name: str | None) -> Dialogue:
    random = source.random
    name = name or random.choices(list(TEXT_MIX), list(TEXT_MIX.values()))[0]
    history: list[tuple[str, str]] = []
    if name == "memory":
        person, task = memory(source)
        history.append((source.choice(_INTRODUCTIONS).format(person), f"Nice to meet you, {person}!"))
    else:
        task = _text_task(source, name)
    if source.chance(0.7 if name == "memory" else 0.25):
        for _ in range(random.randint(1, 2)):
            earlier = GENERATORS[source.choice(_EARLIER_TASKS)](source)
            history.append((earlier.user, earlier.answer))
    thinks = source.chance(0.7 if name in ("addition", "counting") else 0.3)
    return Dialogue(
        name=task.name,
        user=task.user,
        steps=task.steps,
        history=tuple(history),
        tools=task.tools,
        thinks=thinks,
    )


def _text_task(source: Source, name: str) -> Task:
    if name == "secret":
        return secret(source, source.random.randint(0, 14))
    task = GENERATORS[name](source)
    if name == "greeting" and source.chance(0.3):
        return introduction(source, _INTRODUCTIONS)
    return task


def _about_pictures(source: Source, name: str) -> Dialogue:
    random = source.random
    grid = random_grid(random, small=name in ("multi", "video"))
    history: list[tuple[str, str]] = []
    if name in SCENES:
        picture, questions = SCENES[name](source, grid)
        pictures = [picture]
        random.shuffle(questions)
        question = questions[0]
        if len(questions) > 1 and source.chance(0.25):
            history = [(MEDIA + _spelled(random, questions[1].text), questions[1].answer)]
    elif name == "multi":
        pictures, question = several_images(source, grid)
        if source.chance(0.3):  # of different sizes
            pictures = [picture.with_grid(random_grid(random, small=True)) for picture in pictures]
    else:
        pictures, question = video(source, grid)
    text = _spelled(random, question.text)
    return Dialogue(
        name=name,
        user=text if history else MEDIA + text,
        steps=(Say("I look at the picture.", question.answer),),
        history=tuple(history),
        pictures=tuple(pictures),
        is_video=name == "video",
    )


def _spelled(random: Random, question: str) -> str:
    return question.replace("colour", "color") if random.random() < 0.4 else question


def _system_turn(random: Random, dialogue: Dialogue) -> str:
    text = random.choice(_SYSTEM_TEXTS) if random.random() < 0.25 else ""
    if not (dialogue.tools or text or dialogue.thinks):
        return ""
    think = "<|think|>" + random.choice(["", "\n"]) if dialogue.thinks else ""
    return f"<|turn>system\n{think}{text}{''.join(map(_declaration, dialogue.tools))}<turn|>\n"


def _placeholders(random: Random, dialogue: Dialogue) -> str:
    counts = [picture.soft_tokens for picture in dialogue.pictures]
    if dialogue.is_video:
        rate = random.choice([1, 1, 1, 2, 0.5])
        seconds = [int(frame / rate) for frame in range(len(counts))]
        return " ".join(
            f"{second // 60:02d}:{second % 60:02d} <|image>{'<|video|>' * count}<image|>"
            for second, count in zip(seconds, counts, strict=True)
        )
    separator = random.choice(["", "", "\n", " "]) if len(counts) > 1 else ""
    return separator.join(f"<|image>{'<|image|>' * count}<image|>" for count in counts)


def _declaration(tool: ToolDefinition) -> str:
    properties = ",".join(
        f"{parameter.name}:{{"
        + (f"description:{_value(parameter.description)}," if parameter.description else "")
        + f"type:{_value('STRING')}}}"
        for parameter in tool.parameters
    )
    required = ",".join(_value(parameter.name) for parameter in tool.parameters if parameter.required)
    parameters = f"{{properties:{{{properties}}},required:[{required}],type:{_value('OBJECT')}}}"
    description = _value(tool.description)
    return f"<|tool>declaration:{tool.name}{{description:{description},parameters:{parameters}}}<tool|>"


def _object(fields: Mapping[str, object]) -> str:
    return "{" + ",".join(f"{name}:{_value(value)}" for name, value in fields.items()) + "}"


def _value(value: object) -> str:
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else str(value)
