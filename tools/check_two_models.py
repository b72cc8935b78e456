"""Two models under one cap: the second loads while the first serves; exit 1 if a share, a text or a refusal is wrong.

    python tools/check_two_models.py FIRST SECOND --physical-gib N

Each model is what ``serve`` takes. ``--physical-gib`` is the memory that the settings claim
the machine has; choose it so small that the largest request that the first model takes while
it is alone does not fit beside the second. It runs where no test suite can: with models of real size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import httpx

from darkbloom_core.contracts import Prompt
from darkbloom_core.engine import GenerationRequest, OutputStream, PlainParser, SamplingParams
from darkbloom_core.errors import DarkbloomError
from darkbloom_core.plugins import load_plugins
from darkbloom_core.server import BackgroundServer, create_app
from darkbloom_core.settings import Settings
from darkbloom_core.slots import ModelPlaces, Slot, SlotManager, hub_folder, resolve_model
from darkbloom_core.telemetry import SinkEmitter

STREAM_TOKENS, BUFFERED = 96, 16
PROMPT = "Once upon a time"


def main() -> None:
    asked = _arguments()
    plugins = load_plugins()
    settings = Settings(
        memory={
            "physical_bytes": int(asked.physical_gib * 2**30),
            **({"activation_bytes": asked.activation_mib * 2**20} if asked.activation_mib else {}),
        },
        telemetry={"sample_seconds": 0},
        prefix={"reuse": "off"},
        engine={"event_buffer": BUFFERED},
    )
    emitter = SinkEmitter([])
    slots = SlotManager(settings, plugins.family_for, emitter)
    places = ModelPlaces(hub=hub_folder(os.environ), offered=plugins.checkpoints())
    first, second = (resolve_model(word, places) for word in (asked.first, asked.second))
    for found in (first, second):
        slots.add(found.name, found.path)
    with BackgroundServer(create_app(slots, settings, emitter)) as server:
        _run(slots, server.url, first.name, second.name)
    slots.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--physical-gib", type=float, required=True)
    parser.add_argument("--activation-mib", type=int, help="instead of the settings' own")
    return parser.parse_args()


def _run(slots: SlotManager, url: str, first: str, second: str) -> None:
    slot = slots.load_known(first).result()
    alone = _grants(slots)
    longest = _longest(slot)
    print(f"alone, the first model takes a request of {longest} output tokens")
    whole = _tokens(list(_stream(slot, STREAM_TOKENS)))
    stream = iter(_stream(slot, STREAM_TOKENS))
    events = [next(stream) for _ in range(4)]
    began = time.monotonic()
    load = slots.load_known(second)
    while not load.done():
        if len(events) < STREAM_TOKENS // 2:
            events.append(next(stream))
        else:
            time.sleep(0.01)
    load.result()
    shared = _grants(slots)
    print(f"loaded beside a stream in {time.monotonic() - began:.1f} s; shares {alone} then {shared}")
    _holds("the first model's share shrank", shared[first] < alone[first])
    _holds("the shares are within the budget", sum(shared.values()) <= slots.memory.budget())
    _holds("the stream runs still", slot.engine.status().running == 1)
    refused = httpx.post(
        f"{url}/v1/completions",
        json={"model": first, "prompt": PROMPT, "max_tokens": longest},
        timeout=60,
    )
    said = (refused.status_code, int(refused.headers.get("retry-after", 0)) >= 1)
    _holds(
        f"what fitted before is refused with 503 and Retry-After: {refused.text[:200]}", said == (503, True)
    )
    _holds("the stream's tokens are as undisturbed", _tokens([*events, *stream]) == whole)
    answer = httpx.post(
        f"{url}/v1/completions", json={"model": second, "prompt": PROMPT, "max_tokens": 8}, timeout=300
    )
    _holds("the second model answers", answer.status_code == 200)
    slots.unload(second)
    _holds("unloading the second gives the first its exact share back", _grants(slots) == alone)
    _holds("and the longest request fits again", _fits(slot, longest))


def _longest(slot: Slot) -> int:
    """The most output tokens of a request that fits now, to 64 tokens."""
    fits, too_many = 0, slot.description.context_tokens
    while too_many - fits > 64:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if _fits(slot, middle) else (fits, middle)
    return fits


def _fits(slot: Slot, tokens: int) -> bool:
    try:
        _stream(slot, tokens).cancel()
    except DarkbloomError:
        return False
    while slot.engine.status().running + slot.engine.status().waiting:
        time.sleep(0.01)
    return True


def _stream(slot: Slot, tokens: int) -> OutputStream:
    return slot.engine.submit(
        GenerationRequest(
            id=f"check-{time.monotonic_ns()}",
            prompt=Prompt(slot.codec.encode_text(PROMPT)),
            parser=PlainParser(),
            max_tokens=tokens,
            sampling=SamplingParams(
                temperature=0.0, logprobs=0
            ),  # an event for each token, though it has no text
            ignore_stop_ids=True,
        )
    )


def _tokens(events: list) -> list[int]:
    return [one.token for event in events[:-1] for one in event.logprobs]


def _grants(slots: SlotManager) -> dict[str, int]:
    return {slot.name: slot.grant_bytes for slot in slots.slots()}


def _holds(what: str, held: bool) -> None:
    print(f"{'holds' if held else 'DOES NOT HOLD'}: {what}", flush=True)
    if not held:
        sys.exit(1)


if __name__ == "__main__":
    main()
