"""The weight layouts of GPT-OSS checkpoints, brought to one naming.

Three layouts of the experts are in the wild: the publisher's (``gate_up_proj_blocks`` and
``_scales``: MXFP4, gate and up rows interleaved), the one that transformers writes
(``gate_up_proj``, not quantised, input dimension first) and the MLX community's
(``gate_proj.weight``, plain or quantised). Ours is the last one's naming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from darkbloom_core.checkpoint import TensorInfo, Weights, check_tensors
from darkbloom_core.contracts import Dtype, Progress
from darkbloom_core.errors import CheckpointError
from darkbloom_gpt_oss._config import MXFP4, Format, GptOssConfig
from darkbloom_gpt_oss._shapes import Matrix, matrices

if TYPE_CHECKING:
    import mlx.core as mx

_FLOATS = frozenset({"BF16", "F16", "F32"})
_BYTES = frozenset({"U8"})
_WORDS = frozenset({"U32"})
_MXFP4_NAN = 255  # of the scale's 8-bit exponent


@dataclass(frozen=True, slots=True)
class _Expected:
    shape: tuple[int, ...]
    dtypes: frozenset[str]


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Arrays by mlx-lm's names, floating ones in one dtype, and how each quantised module is packed."""

    arrays: dict[str, mx.array]
    formats: dict[str, Format]


def load_weights(
    weights: Weights, config: GptOssConfig, dtype: Dtype, progress: Progress | None
) -> LoadedWeights:
    """Check every tensor's name, shape and dtype, then read and convert them, dropping each source as it goes.

    Raises ``CheckpointError`` naming what is missing, unexpected, wrongly shaped or not finite.
    """
    formats = _formats(weights, config)
    expected = dict(_expected(weights, config, formats))
    check_tensors({name: each.shape for name, each in expected.items()}, weights.shapes, weights.path)
    for name, each in expected.items():
        info = weights.tensors[name]
        if info.dtype not in each.dtypes:
            raise CheckpointError(
                f"{info.file}: tensor {name} is {info.dtype} instead of {' or '.join(sorted(each.dtypes))}"
            )
    return LoadedWeights(_convert(weights, weights.load(progress), dtype), formats)


def _formats(weights: Weights, config: GptOssConfig) -> dict[str, Format]:
    """Packing of each quantised module: read off its tensors, which must agree with what the config says of it."""
    formats = {}
    stored = weights.tensors
    for matrix in matrices(config):
        path = matrix.path
        if f"{path}.scales" in stored:
            found = _packing(path, matrix.inputs, stored)
        elif _is_publishers(path, stored):
            found = MXFP4
        else:
            if matrix.is_expert and config.packing(path, matrix.inputs) is not None:
                raise CheckpointError(
                    f"{weights.path}: config.json says that the experts are quantised, but {path} is not"
                )
            continue
        if config.quantization is None:
            raise CheckpointError(f"{weights.path}: {path} is quantised, but config.json has no quantization")
        said = config.quantization.modules.get(path, found)
        if said != found:
            raise CheckpointError(f"{weights.path}: {path} is packed as {found}, config.json says {said}")
        formats[path] = found
    return formats


def _packing(path: str, inputs: int, stored: Mapping[str, TensorInfo]) -> Format:
    scales = stored[f"{path}.scales"]
    if f"{path}.weight" not in stored or not scales.shape or not scales.shape[-1]:
        raise CheckpointError(f"{scales.file}: tensor {path}.scales without a matching {path}.weight")
    group_size = inputs // scales.shape[-1]
    bits = stored[f"{path}.weight"].shape[-1] * 32 // inputs
    return Format("mxfp4" if scales.dtype == "U8" else "affine", bits, group_size)


def _is_publishers(path: str, stored: Mapping[str, TensorInfo]) -> bool:
    experts, _, _ = path.rpartition(".")
    return experts.endswith(".experts") and any(
        f"{experts}.{stem}_{part}" in stored
        for stem in ("gate_up_proj", "down_proj")
        for part in ("blocks", "scales")
    )


def _expected(
    weights: Weights, config: GptOssConfig, formats: Mapping[str, Format]
) -> Iterator[tuple[str, _Expected]]:
    yield "model.norm.weight", _Expected((config.hidden_size,), _FLOATS)
    for index in range(len(config.windows)):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", _Expected((config.hidden_size,), _FLOATS)
        yield f"{layer}.self_attn.sinks", _Expected((config.q_heads,), _FLOATS)
        yield from _expected_fused(f"{layer}.mlp.experts", weights, config)
    for matrix in matrices(config):
        if not matrix.is_expert or f"{matrix.path}.weight" in weights.tensors:
            yield from _expected_matrix(matrix, formats.get(matrix.path))


def _expected_matrix(matrix: Matrix, packing: Format | None) -> Iterator[tuple[str, _Expected]]:
    path = matrix.path
    *rows, inputs = matrix.shape
    if matrix.biased:
        yield f"{path}.bias", _Expected(tuple(rows), _FLOATS)
    if packing is None:
        yield f"{path}.weight", _Expected(matrix.shape, _FLOATS)
        return
    yield f"{path}.weight", _Expected((*rows, inputs * packing.bits // 32), _WORDS)
    groups = (*rows, inputs // packing.group_size)
    if packing.mode == "mxfp4":
        yield f"{path}.scales", _Expected(groups, _BYTES)
    else:
        yield f"{path}.scales", _Expected(groups, _FLOATS)
        yield f"{path}.biases", _Expected(groups, _FLOATS)


def _expected_fused(experts: str, weights: Weights, config: GptOssConfig) -> Iterator[tuple[str, _Expected]]:
    """The experts' tensors where gate and up are one; nothing where the layout is the MLX community's."""
    if f"{experts}.gate_proj.weight" in weights.tensors:
        return
    published = _is_publishers(f"{experts}.gate_proj", weights.tensors)
    sizes = {
        "gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }
    for name, (outputs, inputs) in sizes.items():
        yield f"{experts}.{name}_bias", _Expected((config.experts, outputs), _FLOATS)
        if published:
            groups = (config.experts, outputs, inputs // MXFP4.group_size)
            yield f"{experts}.{name}_blocks", _Expected((*groups, MXFP4.group_size // 2), _BYTES)
            yield f"{experts}.{name}_scales", _Expected(groups, _BYTES)
        else:
            yield f"{experts}.{name}", _Expected((config.experts, inputs, outputs), _FLOATS)


def _convert(weights: Weights, arrays: dict[str, mx.array], dtype: Dtype) -> dict[str, mx.array]:
    import mlx.core as mx

    target = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[dtype]
    converted: dict[str, mx.array] = {}
    for name in list(arrays):
        array = arrays.pop(name)
        if name.endswith("scales") and array.dtype == mx.uint8 and (array == _MXFP4_NAN).any().item():
            raise CheckpointError(f"{weights.tensors[name].file}: tensor {name} has scales that are NaN")
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(target)
        for new_name, new_array in _renamed(name, array):
            mx.eval(new_array)
            converted[new_name] = new_array
        del array
    mx.clear_cache()
    return converted


def _renamed(name: str, array: mx.array) -> Iterator[tuple[str, mx.array]]:
    """One stored tensor under our name, or as its gate and its up half."""
    import mlx.core as mx

    experts, _, part = name.rpartition(".")
    if not experts.endswith(".experts"):
        yield name, array
        return
    stem = "gate_up_proj" if part.startswith("gate_up_proj") else "down_proj"
    suffix = part.removeprefix(stem)
    if suffix == "_blocks":  # 16 bytes of two weights each, low half first: the order of MLX's words
        array = array.view(mx.uint32).flatten(-2)
    halves = {"": array}
    if stem == "gate_up_proj":
        axis_last = suffix in ("", "_bias")
        halves = {
            half: mx.contiguous(array[..., start::2] if axis_last else array[..., start::2, :])
            for half, start in (("gate", 0), ("up", 1))
        }
    kind = {"": "weight", "_bias": "bias", "_blocks": "weight", "_scales": "scales"}[suffix]
    for half, values in halves.items():
        if suffix == "":
            values = values.swapaxes(-1, -2)
        yield f"{experts}.{half or 'down'}_proj.{kind}", values
