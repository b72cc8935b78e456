"""How fast an engine is: smoothed measurements of requests, and of layers. Pure.

Always true: a request counts only if it ended by itself, and a rate that cannot be real does
not count; small pieces of work never make large ones look fast.
"""

from __future__ import annotations

SMOOTHING = 0.3
"""The weight of a new sample; the first one stands for itself."""

SLOWER = 0.7
"""The weight of a layer that took longer than the last ones: a slice must not, whatever else the machine does."""

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


class LayerSeconds:
    """Seconds that one layer takes for ``tokens`` tokens, as slices of all sizes tell it.

    What takes more tokens takes longer in proportion, what takes fewer than ``least_tokens``
    as long as these. ``value`` is what warm-up has measured, None if nothing was.
    """

    def __init__(self, tokens: int, least_tokens: int, value: float | None) -> None:
        self.value = value
        self._tokens = tokens
        self._least_tokens = least_tokens

    def took(self, tokens: int, layers: int, seconds: float) -> None:
        """A slice of ``layers`` layers over ``tokens`` tokens; a small one counts only if it was slower than expected."""
        sample = seconds / max(1, layers) * self._tokens / max(tokens, self._least_tokens)
        if self.value is None:
            self.value = sample
        elif 2 * tokens >= self._tokens or sample > self.value:
            weight = SLOWER if sample > self.value else SMOOTHING
            self.value += weight * (sample - self.value)


class PartSeconds:
    """Seconds that one part of a chunk takes in each layer, by its tokens and by the keys at its chunk's end.

    Layers are told apart, for where chunks have parts, those with a window may take a tenth of
    the others; so are numbers of tokens and of keys, by powers of two.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], LayerSeconds] = {}

    def of(self, layer: int, tokens: int, keys: int) -> float | None:
        """None if none like it has run yet."""
        found = self._found.get((layer, tokens.bit_length(), keys.bit_length()))
        return None if found is None else found.value

    def took(self, layer: int, tokens: int, keys: int, seconds: float) -> None:
        """One part of ``tokens`` tokens."""
        like = (layer, tokens.bit_length(), keys.bit_length())
        self._found.setdefault(like, LayerSeconds(1, 1, None)).took(1, 1, seconds)
