"""From tokens to typed deltas: incremental UTF-8, the family's parser, stop strings. One pipeline per output.

Always true: half a character is never emitted; the deltas fold to the same text however
the tokens were cut; of several stop strings the one that is complete first wins (of those
complete at once, the one that began first), and what was held back is emitted when the
output ends without a match.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

from darkbloom_core.contracts import ContentDelta, Delta, OutputParser, ReasoningDelta


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces; it is ``matched`` then."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string; '' once one has matched."""
        if self.matched is not None:
            return ""
        self._held += text
        places = ((self._held.find(stop), stop) for stop in self._stops)
        found = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if found:
            _, place, self.matched = min(found)
            return self._held[:place]
        keep = self._ambiguous_suffix()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, when no more text comes or something else comes in between."""
        out, self._held = (self._held if self.matched is None else ""), ""
        return out

    def _ambiguous_suffix(self) -> int:
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0


class TextPipeline:
    """Tokens in, deltas out. ``stop_string`` is the one that has matched in the content, if one has."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        control_ids: frozenset[int],
        parser: OutputParser,
        stops: tuple[str, ...],
    ) -> None:
        self._token_bytes = token_bytes
        self._control_ids = control_ids
        self._parser = parser
        self._matcher = StopMatcher(stops) if stops else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reasons = False
        self.reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token: int) -> tuple[Delta, ...]:
        """The deltas that one more token brings."""
        if token in self._control_ids:
            self._decoder.reset()
            deltas = self._parser.control(token)
        else:
            text = self._decoder.decode(self._token_bytes(token))
            deltas = self._parser.text(text) if text else ()
        if deltas:
            self._reasons = isinstance(deltas[-1], ReasoningDelta)
        self.reasoning_tokens += self._reasons
        return self._guard(deltas) if self._matcher is not None else tuple(deltas)

    def finish(self) -> tuple[Delta, ...]:
        """What was held back. Bytes of an unfinished character are dropped."""
        deltas = self._guard(self._parser.finish())
        held = self._matcher.flush() if self._matcher is not None else ""
        return (*deltas, ContentDelta(held)) if held else deltas

    def _guard(self, deltas: Iterable[Delta]) -> tuple[Delta, ...]:
        matcher = self._matcher
        if matcher is None:
            return tuple(deltas)
        out: list[Delta] = []
        for delta in deltas:
            if matcher.matched is not None:
                break
            if isinstance(delta, ContentDelta):
                text = matcher.push(delta.text)
                if text:
                    out.append(ContentDelta(text))
                continue
            held = matcher.flush()
            if held:
                out.append(ContentDelta(held))
            out.append(delta)
        return tuple(out)


class PlainParser:
    """All text is content; control tokens show nothing. For text completions."""

    def control(self, token: int) -> tuple[Delta, ...]:
        return ()

    def text(self, text: str) -> tuple[Delta, ...]:
        return (ContentDelta(text),)

    def finish(self) -> tuple[Delta, ...]:
        return ()
