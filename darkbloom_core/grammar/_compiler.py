"""Compiles grammars against one tokenizer, and keeps track of one output under a compiled one.

Always true: what a client sent is compiled within bounds of length, memory and stack, and
whatever is wrong with it is an ``InvalidRequest`` that names its field.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import llguidance

from darkbloom_core.contracts import ChatCodec, ClientText, Grammar
from darkbloom_core.errors import GenerationFailed, InvalidRequest
from darkbloom_core.grammar._bounds import check_bounds
from darkbloom_core.grammar._faults import find_fault
from darkbloom_core.grammar._lark import client_texts, lark_sources

STACK_BYTES = 256 * 1024**2
"""The compiler recurses as deep as a grammar refers from rule to rule; only what is used takes memory."""

COMPILATIONS_AT_ONCE = 2

TEXTS_ALONE = 32
"""Up to so many texts of a client are compiled alone as well: one that nothing fits would only never be written."""

SEARCH_SECONDS = 1.0
"""How long the place of a fault is looked for."""

_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=20_000, step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False
)
"""An output's matcher takes at most about 40 MB, and a step of it a few milliseconds."""

_TOO_COMPLEX = ("limit", "too many", "max is", "fuel")
"""Words of the errors of a matcher that has passed ``_LIMITS``."""

_DEAD_END = "NoExtension"
"""A word of the error of a matcher after which no token fits: a rule that never ends, or text that no token writes."""

Result = TypeVar("Result")

_compiling = threading.Semaphore(COMPILATIONS_AT_ONCE)


class GrammarCompiler:
    """For the outputs of one ``codec``. Thread-safe; reads the vocabulary when it is first needed."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Blocks, for milliseconds as a rule and for a second the first time. Raises ``InvalidRequest``."""
        texts = tuple(client_texts(grammar))
        check_bounds(texts)
        return _with_deep_stack(lambda: self._compile(grammar, texts))

    def _compile(self, grammar: Grammar, texts: tuple[ClientText, ...]) -> CompiledGrammar:
        matcher = self._matcher(grammar)
        alone = texts if len(texts) <= TEXTS_ALONE else ()
        fault = _fault(matcher) or next(filter(None, (_fault(self._matcher(text)) for text in alone)), "")
        if fault:
            until = time.monotonic() + SEARCH_SECONDS
            fault_of = lambda text: _fault(self._matcher(text))  # noqa: E731
            raise find_fault(texts, fault, fault_of, lambda: time.monotonic() < until)
        return CompiledGrammar(matcher, self._codec.vocab_size, texts[0].origin if texts else None)

    def _matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._vocabulary(), lark_sources(grammar), log_level=0, limits=_LIMITS)

    def _vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._codec))
                self._tokenizer = llguidance.LLTokenizer(wrapper)
            return self._tokenizer


class CompiledGrammar:
    """What the outputs of one request must be. ``origin`` is the field that says so, if a client does."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, origin: str | None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._origin = origin

    def constraint(self) -> MatcherConstraint:
        """For one output, from its beginning."""
        return MatcherConstraint(self._matcher.deep_copy(), self._vocab_size, self._origin)


class MatcherConstraint:
    """Implements ``contracts.TokenConstraint``."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, origin: str | None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._origin = origin
        self.complete = False

    def allowed(self) -> bytes:
        mask = bytearray(self._matcher.compute_bitmask())
        own_end = 1 << self._vocab_size % 8  # grammars spell out the end themselves
        mask[self._vocab_size // 8] &= ~own_end
        if self._matcher.is_error() or not any(mask):
            raise self._fault()
        return bytes(mask)

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._fault()
        self.complete = self._matcher.is_stopped()

    def _fault(self) -> InvalidRequest | GenerationFailed:
        error = self._matcher.get_error()
        where = "" if self._origin is None else f"{self._origin}: "
        if any(word in error for word in _TOO_COMPLEX):
            return InvalidRequest(f"{where}the grammar or schema is too complex", param=self._origin)
        if self._origin is not None and _DEAD_END in error:
            return InvalidRequest(f"{where}an answer came to where nothing fits it", param=self._origin)
        return GenerationFailed("the output left its grammar")


class _Vocabulary:
    """What llguidance asks of a tokenizer. Its own end token is one id past those of the codec."""

    def __init__(self, codec: ChatCodec) -> None:
        size = codec.vocab_size
        words = [codec.token_bytes(token) for token in range(size)]
        self.special_token_ids = [token for token, word in enumerate(words) if not word] + [size]
        self.tokens = [word or f"<{token}>".encode() for token, word in enumerate(words)] + [b"<end>"]
        self.eos_token_id = size
        self.bos_token_id = None
        self._encode = codec.encode_text
        self._words = words

    def __call__(self, text: str) -> list[int]:
        """The tokens that write ``text``; none if there are none that write just that."""
        ids = self._encode(text)
        return list(ids) if b"".join(self._words[token] for token in ids) == text.encode() else []


def _fault(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a grammar, '' if nothing is."""
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return "nothing can be written that fits it"
    return matcher.get_error()


def _with_deep_stack(call: Callable[[], Result]) -> Result:
    """The result of ``call``, made in a thread with a stack of ``STACK_BYTES``."""
    results: list[Result] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as fault:  # raised again where it belongs
            faults.append(fault)

    with _compiling:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
        thread.join()
    if faults:
        raise faults[0]
    return results[0]
