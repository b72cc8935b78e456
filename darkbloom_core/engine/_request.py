"""What goes into the engine and what comes out: requests, events, usage. Plain values, no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from darkbloom_core.contracts import (
    Delta,
    FinishReason,
    OutputParser,
    PreparedPicture,
    Prompt,
    TokenConstraint,
)
from darkbloom_core.errors import DarkbloomError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a row's tokens are chosen.

    ``temperature`` 0 is exact arg-max. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``logprobs`` is None for none, else how many alternatives to report with each token.
    The draw depends on (``seed``, choice index, step) alone; a missing seed is drawn once
    per request.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One output to generate. ``id`` is unique among live requests of the engine.

    ``stop`` strings match in the answer's content only, not in reasoning or tool calls.
    ``constraint`` says which tokens may come; the output ends when it is complete.
    ``ignore_stop_ids`` keeps going past the model's end tokens (for benchmarks).
    Only requests of the same ``scope`` and ``cache_key`` share KV of their prompts.
    ``pictures`` has every picture that the prompt's spans name.
    """

    id: str
    prompt: Prompt
    parser: OutputParser
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    choice: int = 0
    priority: int = 0
    constraint: TokenConstraint | None = None
    ignore_stop_ids: bool = False
    scope: str | None = None
    cache_key: str | None = None
    pictures: tuple[PreparedPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability before any sampling parameter is applied."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. The end token counts as completion; ``cached_tokens`` of the prompt were not recomputed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, of a monotonic clock, spent waiting, in prefill and in decode; None where it never came to that."""

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    time_to_first_token_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Some new output, in order. ``logprobs`` is empty unless asked for."""

    deltas: tuple[Delta, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The last event of every stream, exactly once. ``error`` is set if and only if ``reason`` is "error".

    ``stop_string`` is the one of ``GenerationRequest.stop`` that ended the output, if one did.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    error: DarkbloomError | None = None
    stop_string: str | None = None


OutputEvent = OutputDelta | OutputEnd
