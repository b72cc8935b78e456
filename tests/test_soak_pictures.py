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


def test_pictures_and_videos_are_named_right(live_server) -> None:
    """Every question by OpenAI's client; those about pictures also by Anthropic's, which must say the same."""
    asked, right, differing = Counter(), Counter(), []
    with (
        openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as first,
        anthropic.Anthropic(base_url=live_server.url, api_key="none", max_retries=0) as second,
    ):
        for number in range(QUESTIONS):
            one = question(KINDS[number % len(KINDS)], number // len(KINDS))
            said = ask_openai(first, one)
            asked[one.kind] += 1
            right[one.kind] += said == one.answer
            if not one.is_video and ask_anthropic(second, one) != said:
                differing.append((one.kind, number))
    kinds = {kind: f"{right[kind]} of {asked[kind]}" for kind in KINDS}
    share = right.total() / QUESTIONS
    keep(
        "pictures-http",
        f"{right.total()} of {QUESTIONS} answers right ({share:.1%}), by OpenAI's client; Anthropic's got other "
        f"answers to {len(differing)} of the {QUESTIONS - asked['video'] - asked['motion']} about pictures",
        {"questions": QUESTIONS, "right": kinds},
    )
    assert share >= LEAST, kinds
    assert not differing
