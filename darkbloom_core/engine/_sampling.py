"""From logits to tokens, in one vectorised pass over the batch.

A row's draw is one uniform number that depends on (seed, choice index, step) alone, put
through the inverse of the row's cumulative distribution: neighbours, devices and MLX's
random state have no part in it. Temperature 0 is exact arg-max.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from darkbloom_core.engine._request import SamplingParams, TokenLogprob

LEAST_TEMPERATURE = 1e-5
"""Below it a row is greedy: logits by a smaller number may be infinite in float32."""


def uniform(seed: int, choice: int, step: int) -> float:
    """A number in [0, 1) as float32 can hold it, from the first 24 bits of BLAKE2b of the three integers."""
    message = f"{seed}/{choice}/{step}".encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 40) / 2**24


class SampledRow:
    """What the sampler knows of one row. ``tokens`` are those of the output that were read so far."""

    __slots__ = ("choice", "params", "prompt", "seed", "tokens")

    def __init__(
        self, params: SamplingParams, seed: int, choice: int, prompt: tuple[int, ...], tokens: list[int]
    ) -> None:
        self.params = params
        self.seed = seed
        self.choice = choice
        self.prompt = prompt
        self.tokens = tokens

    @property
    def has_penalty(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )


class Sampler:
    """Arrays for one list of rows; made anew when the list changes.

    ``unread`` is what was launched for these rows but not yet read, ``[B]`` int32, or
    None: penalties count it too.
    """

    def __init__(self, rows: Sequence[SampledRow], vocab_size: int, unread: mx.array | None) -> None:
        self._rows = tuple(rows)
        params = [row.params for row in rows]
        greedy = [one.temperature < LEAST_TEMPERATURE for one in params]
        self._all_greedy, self._any_greedy = all(greedy), any(greedy)
        self._temperature = _column(
            [1.0 if is_greedy else one.temperature for is_greedy, one in zip(greedy, params, strict=True)]
        )
        self._is_greedy = mx.array(greedy)
        self._filters = any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in params)
        if self._filters:
            self._top_k = _column([one.top_k or vocab_size for one in params])
            self._top_p = _column([one.top_p if one.top_p < 1 else math.inf for one in params])
            self._min_p = _column([one.min_p for one in params])
        self._bias = _bias(params, vocab_size)
        self._penalties = _Penalties(rows, vocab_size, unread) if any(r.has_penalty for r in rows) else None
        self.logprobs = max((one.logprobs for one in params if one.logprobs is not None), default=None)

    def sample(
        self, logits: mx.array, steps: Sequence[int], allowed: mx.array | None = None
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Choose a token for each row of ``logits`` ``[B, V]``; ``steps[b]`` is the row's index of output token.

        Tokens that are not ``allowed`` (``[B, V]`` bool) are never chosen, whatever their bias.
        Returns tokens ``[B]`` int32, and if any row asked for log-probabilities the arrays
        that ``read_logprobs`` takes. Nothing is evaluated.
        """
        raw = logits.astype(mx.float32)
        shaped = raw if self._bias is None else raw + self._bias
        if self._penalties is not None:
            shaped = self._penalties.apply(shaped)
        if allowed is not None:
            shaped = mx.where(allowed, shaped, -mx.inf)
        tokens = self._choose(shaped, steps)
        if self._penalties is not None:
            self._penalties.count(tokens)
        if self.logprobs is None:
            return tokens, ()
        return tokens, _logprob_arrays(raw, tokens, self.logprobs)

    def read_logprobs(
        self, index: int, token: int, arrays: tuple[list[Any], ...]
    ) -> tuple[TokenLogprob, ...]:
        """Row ``index``'s log-probabilities of this step, if it asked for them."""
        count = self._rows[index].params.logprobs
        if count is None:
            return ()
        chosen, top_ids, top_values = arrays
        top = tuple(zip(top_ids[index][:count], top_values[index][:count], strict=True))
        return (TokenLogprob(token, chosen[index], top),)

    def _choose(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        if self._all_greedy:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        draws = _column(
            [uniform(row.seed, row.choice, step) for row, step in zip(self._rows, steps, strict=True)]
        )
        scaled = logits / self._temperature
        drawn = self._draw_filtered(scaled, draws) if self._filters else _draw(mx.softmax(scaled, -1), draws)
        if not self._any_greedy:
            return drawn
        return mx.where(self._is_greedy, mx.argmax(logits, axis=-1).astype(mx.int32), drawn)

    def _draw_filtered(self, scaled: mx.array, draws: mx.array) -> mx.array:
        """As ``_draw``, of what the filters leave; a row that has none is drawn as if no row had any."""
        order = mx.argsort(-scaled, axis=-1)
        weights = mx.softmax(scaled, axis=-1)
        ranked = mx.take_along_axis(weights, order, axis=-1)
        before = mx.cumsum(ranked, axis=-1) - ranked
        rank = mx.arange(scaled.shape[-1])[None]
        keep = (before < self._top_p) & (rank < self._top_k) & (ranked >= self._min_p * ranked[:, :1])
        kept = mx.put_along_axis(mx.zeros(scaled.shape, mx.bool_), order, keep | (rank == 0), axis=-1)
        return _draw(mx.where(kept, weights, 0.0), draws)


class _Penalties:
    """Repetition over prompt and output (Keskar et al., 2019), presence and frequency over the output (OpenAI's definition)."""

    def __init__(self, rows: Sequence[SampledRow], vocab_size: int, unread: mx.array | None) -> None:
        counts = np.zeros((len(rows), vocab_size), np.float32)
        seen = np.zeros((len(rows), vocab_size), bool)
        for index, row in enumerate(rows):
            np.add.at(counts[index], row.tokens, 1)
            seen[index, list(row.prompt)] = True
        self._counts = mx.array(counts)
        self._in_prompt = mx.array(seen)
        self._repetition = _column([row.params.repetition_penalty for row in rows])
        self._presence = _column([row.params.presence_penalty for row in rows])
        self._frequency = _column([row.params.frequency_penalty for row in rows])
        if unread is not None:
            self.count(unread)

    def apply(self, logits: mx.array) -> mx.array:
        produced = self._counts > 0
        repeated = mx.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = mx.where(produced | self._in_prompt, repeated, logits)
        return logits - self._presence * produced - self._frequency * self._counts

    def count(self, tokens: mx.array) -> None:
        self._counts = self._counts.at[mx.arange(tokens.shape[0]), tokens].add(1.0)


def token_mask(masks: Sequence[bytes | None], vocab_size: int) -> mx.array | None:
    """``[B, V]`` bool from bits as ``TokenConstraint.allowed`` gives them; None if no row has any."""
    if all(mask is None for mask in masks):
        return None
    width = -(-vocab_size // 8)
    rows = np.full((len(masks), width), 0xFF, np.uint8)
    for row, mask in zip(rows, masks, strict=True):
        if mask is not None:
            row[:] = 0
            row[: len(mask)] = np.frombuffer(mask, np.uint8)[:width]
    bits = (mx.array(rows)[:, :, None] >> mx.arange(8, dtype=mx.uint8)) & 1
    return bits.reshape(len(masks), -1)[:, :vocab_size].astype(mx.bool_)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]


def _draw(weights: mx.array, draws: mx.array) -> mx.array:
    """The inverse of the cumulative sum of ``weights`` ``[B, V]`` at ``draws`` ``[B, 1]`` of its total."""
    cumulative = mx.cumsum(weights, axis=-1)
    return mx.sum(cumulative <= draws * cumulative[:, -1:], axis=-1).astype(mx.int32)


def _bias(params: Sequence[SamplingParams], vocab_size: int) -> mx.array | None:
    if not any(one.logit_bias for one in params):
        return None
    bias = np.zeros((len(params), vocab_size), np.float32)
    for index, one in enumerate(params):
        for token, value in one.logit_bias.items():
            bias[index, token] = value
    return mx.array(bias)


def _logprob_arrays(raw: mx.array, tokens: mx.array, count: int) -> tuple[mx.array, ...]:
    logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    count = min(count, raw.shape[-1])
    if count == 0:
        empty = mx.zeros((raw.shape[0], 0))
        return chosen, empty, empty
    ids = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return chosen, mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
