"""Every matrix of a GPT-OSS model: its path, shape and bytes, in the naming that the loaded model has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from darkbloom_core.contracts import ELEMENT_BYTES, Dtype
from darkbloom_gpt_oss._config import Format, GptOssConfig


@dataclass(frozen=True, slots=True)
class Matrix:
    """``shape`` is ``[outputs, inputs]``, with the experts first where there are some. One bias per output, or none."""

    path: str
    shape: tuple[int, ...]
    biased: bool = True

    @property
    def inputs(self) -> int:
        return self.shape[-1]

    @property
    def is_expert(self) -> bool:
        return len(self.shape) == 3

    def bytes(self, dtype: Dtype, packing: Format | None) -> int:
        """With floating numbers in ``dtype``, bias left out."""
        if packing is None:
            return prod(self.shape) * ELEMENT_BYTES[dtype]
        groups = prod(self.shape) // packing.group_size
        scale_bytes = 1 if packing.mode == "mxfp4" else 2 * ELEMENT_BYTES[dtype]
        return prod(self.shape) * packing.bits // 8 + groups * scale_bytes


def matrices(config: GptOssConfig) -> Iterator[Matrix]:
    """All of them, from the embedding to the head."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    queries, keys = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    for path in ("model.embed_tokens", "lm_head"):
        yield Matrix(path, (config.vocab_size, hidden), biased=False)
    for index in range(len(config.windows)):
        attention, mlp = (f"model.layers.{index}.{part}" for part in ("self_attn", "mlp"))
        yield Matrix(f"{attention}.q_proj", (queries, hidden))
        yield Matrix(f"{attention}.k_proj", (keys, hidden))
        yield Matrix(f"{attention}.v_proj", (keys, hidden))
        yield Matrix(f"{attention}.o_proj", (hidden, queries))
        yield Matrix(f"{mlp}.router", (experts, hidden))
        yield Matrix(f"{mlp}.experts.gate_proj", (experts, inner, hidden))
        yield Matrix(f"{mlp}.experts.up_proj", (experts, inner, hidden))
        yield Matrix(f"{mlp}.experts.down_proj", (experts, hidden, inner))


def memory_per_disk_byte(config: GptOssConfig, dtype: Dtype) -> float:
    """Bytes of the matrices with floating numbers in ``dtype``, for each byte as the config says they are stored."""
    on_disk = in_memory = 0
    for matrix in matrices(config):
        packing = config.packing(matrix.path, matrix.inputs)
        on_disk += matrix.bytes(config.dtype, packing)
        in_memory += matrix.bytes(dtype, packing)
    return in_memory / on_disk
