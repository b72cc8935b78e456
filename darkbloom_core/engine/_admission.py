"""What may enter the engine: the checks of a request at the door, and the worst case that it reserves. Pure."""

from __future__ import annotations

import math

from darkbloom_core.contracts import ELEMENT_BYTES, ModelDescription
from darkbloom_core.engine._kv import row_bytes
from darkbloom_core.engine._request import GenerationRequest, SamplingParams
from darkbloom_core.engine._spans import picture_runs
from darkbloom_core.errors import ContextLengthExceeded, InvalidRequest

MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 4096
MOST_LOGPROBS = 20


LONGEST_PICTURE = 4096
"""The most soft tokens of pictures that touch: they run in one chunk, however long it becomes."""


def check_request(request: GenerationRequest, description: ModelDescription, *, sees: bool = False) -> None:
    """Raise the error that says what is wrong with ``request``, if anything is; ``sees``: the model has a tower."""
    prompt = request.prompt.ids
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens")
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if min(prompt) < 0 or max(prompt) >= description.vocab_size:
        raise InvalidRequest(
            f"the prompt has token ids outside 0 to {description.vocab_size - 1}", param="prompt"
        )
    total = len(prompt) + request.max_tokens
    if total > description.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt's {len(prompt)} tokens and max_tokens {request.max_tokens} exceed "
            f"the context of {description.context_tokens} tokens",
            param="messages",
        )
    _check_pictures(request, sees=sees)
    _check_stop(request.stop)
    check_sampling(request.sampling, description.vocab_size)


def worst_case_bytes(request: GenerationRequest, description: ModelDescription) -> int:
    """Bytes that the request's row may come to allocate, and its pictures once the model has seen them."""
    soft_tokens = sum(span.length for span in request.prompt.spans)
    seen_bytes = soft_tokens * description.hidden_size * ELEMENT_BYTES["float32"]
    return row_bytes(description.layers, len(request.prompt.ids) + request.max_tokens) + seen_bytes


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``InvalidRequest`` naming the parameter that is out of range."""
    _check("temperature", params.temperature, 0.0, math.inf)
    _check("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check("min_p", params.min_p, 0.0, 1.0)
    _check("repetition_penalty", params.repetition_penalty, 0.0, math.inf, open_low=True)
    _check("presence_penalty", params.presence_penalty, -math.inf, math.inf)
    _check("frequency_penalty", params.frequency_penalty, -math.inf, math.inf)
    if params.top_k < 0:
        raise InvalidRequest(f"top_k must be 0 or more, not {params.top_k}", param="top_k")
    if params.logprobs is not None and not 0 <= params.logprobs <= MOST_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MOST_LOGPROBS}, not {params.logprobs}", param="top_logprobs"
        )
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias has token id {token}, outside the vocabulary", param="logit_bias"
            )
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token} is not a finite number", param="logit_bias")


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value}", param=name)
    if value < low or value > high or (open_low and value == low):
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        top = f" and at most {high:g}" if math.isfinite(high) else ""
        raise InvalidRequest(f"{name} must be {bound}{top}, not {value:g}", param=name)


def _check_pictures(request: GenerationRequest, *, sees: bool) -> None:
    """Spans must be in order, in the prompt, and as long as their pictures, each of which has one."""
    spans, pictures = request.prompt.spans, request.pictures
    if spans and not sees:
        raise InvalidRequest("this model does not accept images", param="messages")
    place = 0
    for span in spans:
        if span.start < place or span.length < 1 or not 0 <= span.picture < len(pictures):
            raise InvalidRequest("the pictures of the prompt overlap, or are missing", param="messages")
        if span.length != pictures[span.picture].soft_tokens:
            raise InvalidRequest(
                f"a picture has {pictures[span.picture].soft_tokens} soft tokens, and {span.length} places",
                param="messages",
            )
        place = span.start + span.length
    if place > len(request.prompt.ids) or len({span.picture for span in spans}) < len(spans):
        raise InvalidRequest("the pictures of the prompt overlap, or are missing", param="messages")
    longest = max((end - first for first, end in picture_runs(spans)), default=0)
    if longest > LONGEST_PICTURE:
        raise InvalidRequest(
            f"pictures that touch have {longest} soft tokens together, and at most {LONGEST_PICTURE} are allowed",
            param="messages",
        )


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MOST_STOP_STRINGS:
        raise InvalidRequest(f"at most {MOST_STOP_STRINGS} stop strings, not {len(stop)}", param="stop")
    if any(not text or len(text) > LONGEST_STOP_STRING for text in stop):
        raise InvalidRequest(
            f"a stop string must have between 1 and {LONGEST_STOP_STRING} characters", param="stop"
        )
