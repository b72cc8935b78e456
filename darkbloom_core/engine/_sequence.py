"""What the scheduler knows of a sequence: counts only, no arrays and no text."""

from __future__ import annotations

from dataclasses import dataclass, field

from darkbloom_core.contracts import MediaSpan


@dataclass(slots=True, eq=False)
class Sequence:
    """One output on its way.

    ``prefilled`` prompt tokens have been launched through all layers, ``launched`` tokens
    of the output have been launched (read or not). ``paused`` rows keep their place but
    are not stepped; so are those that are ``held`` until the KV of their prompt's beginning
    has come from elsewhere. ``unseen`` are the pictures that the tower has not been launched
    for. A larger ``priority`` goes first.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    spans: tuple[MediaSpan, ...] = ()
    unseen: set[int] = field(default_factory=set)
    prefilled: int = 0
    launched: int = 0
    paused: bool = False
    held: bool = False
    arrival: int = field(default=0)

    @property
    def is_prefilling(self) -> bool:
        return self.prefilled < self.prompt_tokens

    @property
    def wants_prefill(self) -> bool:
        """Whether a chunk of the prompt is to be launched."""
        return self.is_prefilling and not self.paused and not self.held

    @property
    def wants_decode(self) -> bool:
        """Whether another token is to be launched. The first one comes out of the prefill."""
        return not self.is_prefilling and not self.paused and self.launched < self.max_tokens
