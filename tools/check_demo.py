"""Ask both demo checkpoints their checked prompts through the engine on this machine's device; exit 1 on a wrong answer.

    python tools/check_demo.py [--deterministic]

What runs where no test suite can: on a GPU machine without a network. Prompts that need
tools or more than plain text are left to the suite.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import Chat, ContentDelta, Message, Placement, TextPart
from darkbloom_core.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from darkbloom_core.plugins import load_plugins
from darkbloom_core.slots import current_device

CHECKPOINTS = Path(__file__).parents[1] / "plugins" / "demo" / "darkbloom_demo" / "checkpoints"


def main() -> None:
    wrong = sum(
        check(folder, deterministic="--deterministic" in sys.argv) for folder in sorted(CHECKPOINTS.iterdir())
    )
    sys.exit(1 if wrong else 0)


def check(folder: Path, *, deterministic: bool) -> int:
    """How many answers of the checkpoint in ``folder`` are wrong."""
    config, device = read_config(folder), current_device()
    family = load_plugins().family_for(config)
    description = family.describe(config, device)
    codec = family.codec(folder, description)
    engine = Engine(
        folder.name,
        codec,
        lambda: family.load(folder, description, Placement(device)),
        EngineOptions(deterministic=deterministic),
    )
    engine.load_model()
    engine.start(1 << 30)
    print(folder.name, device.kind, engine.status().choices)
    asked = []
    for number, one in enumerate(json.loads((folder / "prompts.json").read_text())):
        if "tools" in one or any(not isinstance(turn["content"], str) for turn in one["messages"]):
            continue
        turns = tuple(
            Message(role=turn["role"], content=(TextPart(turn["content"]),)) for turn in one["messages"]
        )
        chat = Chat(messages=turns)
        request = GenerationRequest(
            id=str(number),
            prompt=codec.encode_chat(chat),
            parser=codec.parser(chat),
            max_tokens=120,
            sampling=SamplingParams(temperature=0.0),
        )
        asked.append((one, engine.submit(request)))
    wrong = 0
    for one, stream in asked:
        deltas = [delta for event in stream for delta in getattr(event, "deltas", ())]
        text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        if text != one.get("answer", text):
            wrong += 1
            print(f"  wrong: {one['messages'][-1]['content'][:60]!r}: {text!r}, not {one['answer']!r}")
    print(
        f"{folder.name}: {len(asked) - wrong} of {len(asked)} right, at most {engine.status().largest_batch} rows at once"
    )
    engine.close()
    return wrong


if __name__ == "__main__":
    main()
