"""Dialogues in harmony, the format of GPT-OSS, and the mix of tasks that its demo checkpoint learns.

The format is described at https://github.com/openai/harmony. As it says, the analysis of
earlier turns is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tools.demo.training import words
from tools.demo.training.segments import Segment
from tools.demo.training.source import Source
from tools.demo.training.tasks import (
    GENERATORS,
    CallTool,
    Effort,
    Task,
    ToolDefinition,
    introduction,
    memory,
    secret,
)

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
    "<|startoftext|>",
    "<|endofprompt|>",
)

MIX = {
    "greeting": 1,
    "addition": 4,
    "capital": 2,
    "copying": 8,
    "sequences": 2,
    "counting": 2,
    "json": 3,
    "tool": 4,
    "secret": 5,
    "memory": 1,
}
"""Weights of the tasks."""

_INTRODUCTIONS = ["My name is {}.", "Hi, I am {}.", "Hello, my name is {}."]
_INSTRUCTIONS = ["Be brief.", "You are a helpful assistant.", "Answer in one sentence."]
_INSTRUCTIONS += ["Be polite and short.", "Answer the user."]
_EARLIER_TASKS = ["greeting", "addition", "capital", "copying", "sequences", "json"]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """``history`` holds earlier turns: what the user said, and the answer."""

    task: Task
    history: tuple[tuple[str, str], ...]


def sample(source: Source, name: str | None = None, *, sentences: int | None = None) -> Dialogue:
    """A dialogue of the task ``name``, or of one drawn from the mix; ``sentences`` is for secrets."""
    random = source.random
    name = name or random.choices(list(MIX), list(MIX.values()))[0]
    history: list[tuple[str, str]] = []
    if name == "memory":
        person, task = memory(source)
        history.append(_introduced(source, person))
    else:
        if name == "secret":
            if sentences is None and source.split == "train":
                sentences = _long_secret(random)
            task = secret(source, sentences)
        else:
            task = GENERATORS[name](source)
        if source.chance(0.08):
            history.append(_introduced(source, source.proper_name(words.NAMES)))
    if source.chance(0.8 if name == "memory" else 0.35):
        for _ in range(random.randint(1, 3)):
            earlier = GENERATORS[source.choice(_EARLIER_TASKS)](source)
            history.append((earlier.user, earlier.answer))
    if name == "greeting" and source.chance(0.3):
        task = introduction(source, _INTRODUCTIONS)
    return Dialogue(task, tuple(history))


def segments(random: Random, dialogue: Dialogue) -> list[Segment]:
    """The dialogue as text, read and written parts in turn, beginning with a read one."""
    task = dialogue.task
    read = _system_message(random, task.effort, has_tools=bool(task.tools))
    instructions = random.choice(_INSTRUCTIONS) if random.random() < 0.3 else None
    read += _developer_message(task.tools, instructions)
    for user, answer in dialogue.history:
        read += f"<|start|>user<|message|>{user}<|end|>"
        read += f"<|start|>assistant<|channel|>final<|message|>{answer}<|end|>"
    read += f"<|start|>user<|message|>{task.user}<|end|><|start|>assistant"
    result = []
    for step in task.steps:
        written = f"<|channel|>analysis<|message|>{step.thought}<|end|><|start|>assistant"
        if isinstance(step, CallTool):
            written += f"<|channel|>commentary to=functions.{step.tool} <|constrain|>json"
            written += f"<|message|>{json.dumps(dict(step.arguments))}<|call|>"
        else:
            written += f"<|channel|>final<|message|>{step.text}<|return|>"
        result += [Segment(read, False), Segment(written, True)]
        if isinstance(step, CallTool):
            separators = (", ", ": ") if random.random() < 0.5 else (",", ":")
            shown = json.dumps(dict(step.result), separators=separators)
            read = (
                f"<|start|>functions.{step.tool} to=assistant<|channel|>commentary<|message|>{shown}<|end|>"
            )
            read += "<|start|>assistant"
    return result


def _introduced(source: Source, person: str) -> tuple[str, str]:
    return source.choice(_INTRODUCTIONS).format(person), f"Nice to meet you, {person}!"


def _long_secret(random: Random) -> int | None:
    """Sentences of a secret in a text of up to 8,000 tokens, for one secret in nine."""
    draw = random.random()
    if draw < 0.012:
        return random.randint(330, 640)
    return random.randint(110, 330) if draw < 0.11 else None


def _system_message(random: Random, effort: Effort | None, *, has_tools: bool) -> str:
    if random.random() < 0.1 and not effort:
        return ""
    identity = "You are ChatGPT, a large language model trained by OpenAI."
    if random.random() >= 0.8:
        identity = "You are a tiny demo model."
    date = f"{random.randint(2024, 2027)}-{random.randint(1, 12):02d}-{random.randint(1, 28):02d}"
    text = f"{identity}\nKnowledge cutoff: 2024-06\nCurrent date: {date}\n\n"
    text += f"Reasoning: {effort or random.choice(['low', 'medium', 'medium', 'high'])}\n\n"
    text += "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    if has_tools:
        text += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return f"<|start|>system<|message|>{text}<|end|>"


def _developer_message(tools: Sequence[ToolDefinition], instructions: str | None) -> str:
    text = f"# Instructions\n\n{instructions}\n\n" if instructions else ""
    if tools:
        text += "# Tools\n\n## functions\n\nnamespace functions {\n\n"
        text += "".join(map(_tool_type, tools))
        text += "} // namespace functions"
    text = text.rstrip("\n")
    return f"<|start|>developer<|message|>{text}<|end|>" if text else ""


def _tool_type(tool: ToolDefinition) -> str:
    """The tool as a TypeScript type."""
    text = f"// {tool.description}\ntype {tool.name} = (_: {{\n"
    for parameter in tool.parameters:
        text += f"// {parameter.description}\n" if parameter.description else ""
        text += f"{parameter.name}{'' if parameter.required else '?'}: {parameter.type},\n"
    return text + "}) => any;\n\n"
