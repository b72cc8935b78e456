"""What a model family implements, and what the core hands to it while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from darkbloom_core.contracts._chat import ChatCodec
from darkbloom_core.contracts._layers import Dtype, LayerKind
from darkbloom_core.contracts._vision import MediaEmbeddings, VisionSeam

if TYPE_CHECKING:
    import mlx.core as mx

    Array: TypeAlias = mx.array
else:
    Array: TypeAlias = Any

Inputs: TypeAlias = tuple[Array, ...]
"""What flows between layers: hidden ``[B, L, H]`` first, then anything else shaped ``[B, L, ...]``."""

Modality: TypeAlias = Literal["text", "image", "video"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called while loading with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs. ``kind`` is MLX's backend."""

    kind: Literal["cpu", "cuda", "metal"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and as what a model is loaded. ``group`` is where tensor parallelism will come in."""

    device: Device
    group: Any | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a checkpoint is, read from its ``config.json`` alone.

    ``family`` is the describing family's name, ``model_type`` the config's own word.
    ``layers`` has one entry per decoder layer, with the dtype that KV has on the device
    asked about. ``memory_per_disk_byte`` estimates how many bytes a byte of weights on
    disk becomes once loaded there. ``notes`` are lines for a person: ignored fields, and
    the like.
    """

    family: str
    model_type: str
    context_tokens: int
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    modalities: frozenset[Modality] = frozenset({"text"})
    memory_per_disk_byte: float = 1.0
    ignored_fields: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    """The config as the family understood it, for its own ``load``; opaque to the core."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of state that one sequence of ``tokens`` tokens needs over all layers."""
        return sum(layer.bytes(tokens) for layer in self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token costs once every window is full."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def kv_dtypes(self) -> frozenset[Dtype]:
        """The dtypes that KV has on the device that was asked about."""
        return frozenset(layer.dtype for layer in self.layers)


class LayerCache(Protocol):
    """One layer's KV of every row of the batch, during one step. Owned by the core."""

    def attend(self, q: Array, k: Array | None, v: Array | None, *, sinks: Array | None = None) -> Array:
        """Write ``k`` and ``v`` at the rows' positions and attend ``q`` to all that the layer may see.

        ``q`` is ``[B, q_heads, L, k_dim]``, ``k`` ``[B, kv_heads, L, k_dim]``, ``v``
        ``[B, kv_heads, L, v_dim]``, rotary embedding already applied; ``k`` and ``v`` are
        None exactly if the layer borrows (``LayerKind.source``). ``sinks`` is ``[q_heads]``.
        Returns ``[B, q_heads, L, v_dim]``. Call it once per layer; evaluate nothing.
        """
        ...

    def state(self) -> tuple[Array, ...]:
        """A recurrent layer's state, each ``[B, *shape]``; zeros before the first token."""
        ...

    def set_state(self, new: tuple[Array, ...]) -> None:
        """Replace a recurrent layer's state by ``new``, each ``[B, *shape]``."""
        ...


class Batch(Protocol):
    """The rows of one step. Owned by the core; a family only reads it.

    ``offsets`` is ``[B]`` int32: how many positions each row held before this step, so
    the step's first token stands at ``offsets[b]``. ``caches[i]`` belongs to layer ``i``.
    """

    @property
    def offsets(self) -> Array: ...

    @property
    def caches(self) -> Sequence[LayerCache]: ...


class LoadedModel(Protocol):
    """A model whose weights are in memory. Every call comes from the one thread that loaded it.

    None of its methods may evaluate an array (no ``.item()``, no ``mx.eval``): the core
    decides when a step is launched and when it is read.
    """

    @property
    def description(self) -> ModelDescription: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an output: from generation config, config and tokenizer together."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        ...

    @property
    def vision(self) -> VisionSeam | None:
        """How the model sees, or None."""
        ...

    def embed(self, ids: Array, media: MediaEmbeddings | None = None) -> Inputs:
        """``ids`` ``[B, L]`` int32 to the inputs of layer 0; ``media`` replaces placeholders."""
        ...

    def run_layers(self, inputs: Inputs, batch: Batch, first: int, last: int) -> Inputs:
        """Run layers ``first`` to ``last - 1``.

        After the final layer ``inputs[0]`` is the hidden state ``[B, L, H]``.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """``[B, 1, H]`` after the last layer to ``[B, vocab_size]``, final norm and soft cap included."""
        ...


class ModelFamily(Protocol):
    """A family of models. Stateless; heavy imports happen inside its methods."""

    @property
    def name(self) -> str:
        """Short and stable; part of the numerics id of cached blocks."""
        ...

    @property
    def version(self) -> str:
        """The distribution's version; part of the numerics id too."""
        ...

    @property
    def model_types(self) -> frozenset[str]:
        """The values of ``model_type`` in ``config.json`` that this family reads, lower case."""
        ...

    def describe(self, config: Mapping[str, Any], device: Device) -> ModelDescription:
        """Say what a checkpoint is. Pure: reads nothing but ``config``.

        Raises ``UnsupportedCheckpoint`` naming the field if one that changes the
        computation is unknown, missing or contradicts another.
        """
        ...

    def codec(self, path: Path, description: ModelDescription) -> ChatCodec:
        """Read the tokenizer and the chat template of the checkpoint at ``path``; no weights.

        Raises ``CheckpointError`` naming the file that is missing or damaged.
        """
        ...

    def load(
        self,
        path: Path,
        description: ModelDescription,
        placement: Placement,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Load the weights, from safetensors only. No code from the checkpoint is ever run.

        Raises ``CheckpointError`` naming up to ten tensors that are missing, unexpected
        or wrongly shaped.
        """
        ...
