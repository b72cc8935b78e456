"""Generated pictures and videos over HTTP, by the clients that applications use: the demo names what is there."""

from __future__ import annotations

from collections import Counter

import anthropic
import openai
import pytest
from seeing import KINDS, ask_anthropic, ask_openai, question
from soak import keep, length

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

QUESTIONS = length(300, 12)
LEAST = 0.97
TWICE = 5
"""Each so many-th question is asked by both clients, and the answers must be equal."""

RETRIES = 8
"""A machine that is short of memory for a while answers 503."""


def test_pictures_and_videos_are_named_right(live_server) -> None:
    """Anthropic's client asks every second question about pictures, OpenAI's all others."""
    asked, right, differing = Counter(), Counter(), []
    with (
        openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=RETRIES) as first,
        anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=RETRIES) as second,
    ):
        for number in range(QUESTIONS):
            one = question(KINDS[number % len(KINDS)], number // len(KINDS))
            if one.is_video or number % 2 == 0:
                client, said = "OpenAI's client", ask_openai(first, one)
            else:
                client, said = "Anthropic's client", ask_anthropic(second, one)
            for group in (one.kind, client):
                asked[group] += 1
                right[group] += said == one.answer
            if number % TWICE == 0:
                other = ask_openai(first, one) if one.is_video or number % 2 else ask_anthropic(second, one)
                differing += [number] if other != said else []
            print(number, one.kind, said == one.answer, flush=True)  # noqa: T201  # pytest -s shows it
    groups = {group: f"{right[group]} of {asked[group]}" for group in asked}
    found = right["OpenAI's client"] + right["Anthropic's client"]
    clients = ", ".join(f"{groups[name]} by {name}" for name in groups if name.endswith("client"))
    keep(
        "pictures-http",
        f"{found} of {QUESTIONS} answers about pictures and videos right ({found / QUESTIONS:.1%}): {clients}; "
        f"{len(differing)} of {-(-QUESTIONS // TWICE)} that were asked twice got another answer",
        {"questions": QUESTIONS, "right": groups},
    )
    assert found >= LEAST * QUESTIONS, groups
    assert not differing
