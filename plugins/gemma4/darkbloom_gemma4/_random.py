"""A model without a checkpoint: random weights in a described shape, made on the device, for benchmarks."""

from __future__ import annotations

import mlx.core as mx

from darkbloom_core.contracts import ModelDescription
from darkbloom_gemma4._config import Gemma4Config
from darkbloom_gemma4._model import LoadedGemma4
from darkbloom_gemma4._quantization import Scheme
from darkbloom_gemma4._weights import matrices, vectors


def random_model(description: ModelDescription, config: Gemma4Config) -> LoadedGemma4:
    """Matrices that keep the size of what they multiply, vectors of one; quantised as described."""
    dtype = getattr(mx, config.dtype)
    arrays = {name: mx.ones(shape, dtype) for name, shape in vectors(config).items()}
    schemes: dict[str, Scheme] = {}
    for module, matrix in matrices(config).items():
        columns = matrix.shape[-1]
        weight = mx.random.normal(matrix.shape, dtype, scale=columns**-0.5)
        scheme = config.quantization.of(module) if config.quantization is not None else None
        if scheme is None or columns % scheme.group_size:
            arrays[f"{module}.weight"] = weight
        else:
            schemes[module] = scheme
            packed = mx.quantize(weight, group_size=scheme.group_size, bits=scheme.bits, mode=scheme.mode)
            arrays |= {
                f"{module}.{part}": array
                for part, array in zip(("weight", "scales", "biases"), packed, strict=False)
            }
        mx.eval(arrays)  # so that no more than one plain matrix is there at a time
    return LoadedGemma4(description, config, arrays, schemes, frozenset())
