"""How fast an engine reads prompts and writes answers: smoothed, over the requests that ended well. Pure.

Always true: a request counts only if it ended by itself, and a rate that cannot be real does not count.
"""

from __future__ import annotations

SMOOTHING = 0.3
"""The weight of a new sample; the first one stands for itself."""

LEAST_SECONDS = 0.001
MOST_PREFILL_RATE = 20_000.0
"""Tokens per second; a faster prefill did not compute its prompt."""


class Rate:
    """An exponentially weighted mean of tokens per second; None before the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float, most: float = float("inf")) -> None:
        """Count ``tokens`` in ``seconds``; ignored if there are none, too short a time, or a rate above ``most``."""
        if tokens <= 0 or seconds < LEAST_SECONDS or tokens / seconds > most:
            return
        sample = tokens / seconds
        self.value = sample if self.value is None else self.value + SMOOTHING * (sample - self.value)


class Rates:
    """The rates of one engine, told of every request that ended by itself."""

    def __init__(self) -> None:
        self.prefill = Rate()
        self.decode = Rate()

    def ended(
        self,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        first_token_seconds: float,
        decode_seconds: float,
    ) -> None:
        """``first_token_seconds`` since it was submitted, ``decode_seconds`` from the first token to the end.

        A prompt of which some was cached says nothing about prefill.
        """
        if cached_tokens == 0:
            self.prefill.add(prompt_tokens, first_token_seconds, MOST_PREFILL_RATE)
        self.decode.add(completion_tokens - 1, decode_seconds)
