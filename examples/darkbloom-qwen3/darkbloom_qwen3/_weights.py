"""From safetensors files into the network.

The network says which tensors it needs and of which shape; the files say which they have.
They are compared before any weight is read, so a wrong checkpoint fails at once, with one
message that names the tensors.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from darkbloom_core.checkpoint import Weights, check_tensors
from darkbloom_core.errors import UnsupportedCheckpoint
from darkbloom_qwen3._model import Network

if TYPE_CHECKING:
    from darkbloom_core.contracts import Progress
    from darkbloom_qwen3._config import Qwen3Config

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def load_network(path: Path, config: Qwen3Config, progress: Progress | None = None) -> Network:
    """The network with the weights of the checkpoint folder ``path``.

    Raises ``CheckpointError`` naming file and tensor for whatever is wrong with them.
    """
    weights = Weights(path)  # reads the headers only
    found = dict(weights.shapes)
    if config.tied:
        found.pop("lm_head.weight", None)  # some conversions write the tied head a second time

    network = Network(config)
    _quantize_like(network, config, found.keys())
    # MLX is lazy: these parameters have shapes but take no memory, and never will.
    expected = {name: array.shape for name, array in network.tensors().items()}
    check_tensors(expected, found, path)

    arrays = weights.load(progress, want=lambda name: name in found)
    dtype = _DTYPES[config.dtype]
    for name, array in arrays.items():
        if mx.issubdtype(array.dtype, mx.floating) and array.dtype != dtype:
            arrays[name] = array.astype(dtype)
            mx.eval(arrays[name])  # one at a time, so that there are never two copies of the model
    network.load_weights(list(arrays.items()))
    return network


def _quantize_like(network: Network, config: Qwen3Config, tensors: Container[str]) -> None:
    """Turn modules into quantised ones where the checkpoint has scales for them (``weight``, ``scales``, ``biases``)."""

    def scheme(module_path: str, _: nn.Module) -> dict[str, int] | bool:
        quantization = config.quantization_of(module_path)
        if quantization is None or f"{module_path}.scales" not in tensors:
            return False
        return {"bits": quantization.bits, "group_size": quantization.group_size}

    try:
        nn.quantize(network, class_predicate=scheme)
    except ValueError as error:  # bits or a group size that MLX has not, or that do not fit the matrix
        raise UnsupportedCheckpoint(f"config.json: quantization: {error}") from error
