"""How a family sees: pictures to spans of soft tokens. Frames of a video are pictures of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """``length`` placeholder tokens from ``start``, filled by picture number ``picture`` of the request."""

    start: int
    length: int
    picture: int


@dataclass(frozen=True, slots=True)
class MediaEmbeddings:
    """What replaces placeholders in one chunk: ``[length, H]`` for each span.

    The spans' positions count from the chunk's start.
    """

    spans: tuple[MediaSpan, ...]
    embeddings: tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture resized and cut up on the host, ready for the tower.

    ``arrays`` are NumPy arrays that the family's own tower understands; ``digest`` covers
    the pixels and every processing setting that changes them.
    """

    soft_tokens: int
    arrays: dict[str, NDArray[Any]]
    digest: bytes


class VisionSeam(Protocol):
    """The tower of a loaded model, run one picture and a few layers at a time between decode steps.

    What looks at sizes and pixels is called from any thread and uses no MLX; ``start``,
    ``run_layers`` and ``finish`` come from the model's own thread and evaluate nothing.
    """

    @property
    def tower_layers(self) -> int: ...

    @property
    def most_soft_tokens(self) -> int:
        """More than this many soft tokens no picture becomes."""
        ...

    @property
    def most_frames(self) -> int:
        """How many frames of one video the model is made for."""
        ...

    @property
    def soft_token_bytes(self) -> int:
        """Bytes of a prepared picture for each of its soft tokens."""
        ...

    def soft_tokens(self, height: int, width: int, *, video: bool) -> int:
        """How many soft tokens a picture of this size in pixels becomes.

        ``video``: it is a frame of one. Raises ``InvalidRequest`` for a shape that the model cannot take.
        """
        ...

    def prepare(self, pixels: NDArray[np.uint8], *, video: bool) -> PreparedPicture:
        """Resize and cut up ``pixels`` ``[height, width, 3]``; raises like ``soft_tokens``."""
        ...

    def start(self, picture: PreparedPicture) -> tuple[mx.array, ...]:
        """The tower's inputs for ``picture``."""
        ...

    def run_layers(self, inputs: tuple[mx.array, ...], first: int, last: int) -> tuple[mx.array, ...]:
        """Run tower layers ``first`` to ``last - 1``."""
        ...

    def finish(self, inputs: tuple[mx.array, ...]) -> mx.array:
        """``[soft_tokens, H]`` after the last layer, in the text model's space."""
        ...
