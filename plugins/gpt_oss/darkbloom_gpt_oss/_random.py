"""A model without a checkpoint: random weights in a described shape, made on the device, for benchmarks."""

from __future__ import annotations

import mlx.core as mx

from darkbloom_core.contracts import ModelDescription, Placement
from darkbloom_gpt_oss._config import GptOssConfig
from darkbloom_gpt_oss._model import LoadedGptOss, build
from darkbloom_gpt_oss._shapes import matrices
from darkbloom_gpt_oss._weights import LoadedWeights


def random_model(description: ModelDescription, config: GptOssConfig, placement: Placement) -> LoadedGptOss:
    """Matrices that keep the size of what they multiply, norms of one, small biases; quantised as described."""
    dtype = getattr(mx, config.compute_dtype(placement.device.kind))
    arrays: dict[str, mx.array] = {"model.norm.weight": mx.ones((config.hidden_size,), dtype)}
    for index in range(len(config.windows)):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{layer}.{norm}.weight"] = mx.ones((config.hidden_size,), dtype)
        arrays[f"{layer}.self_attn.sinks"] = mx.random.normal((config.q_heads,), dtype)
    formats = {}
    for matrix in matrices(config):
        path, shape = matrix.path, matrix.shape
        weight = mx.random.normal(shape, dtype, scale=matrix.inputs**-0.5)
        found = config.packing(path, matrix.inputs)
        if found is None:
            arrays[f"{path}.weight"] = weight
        else:
            formats[path] = found
            packed = mx.quantize(weight, group_size=found.group_size, bits=found.bits, mode=found.mode)
            arrays |= {
                f"{path}.{part}": array
                for part, array in zip(("weight", "scales", "biases"), packed, strict=False)
            }
        if matrix.biased:
            arrays[f"{path}.bias"] = mx.random.normal(shape[:-1], dtype, scale=0.02)
        mx.eval(arrays)  # so that no more than one plain matrix is there at a time
    on_cpu = placement.device.kind == "cpu"
    loaded = LoadedWeights(arrays, formats)
    return LoadedGptOss(description, config, build(config, loaded), frozenset(), on_cpu)
