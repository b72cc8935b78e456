"""From the tensors of any layout to one naming: that of MLX conversions, without a prefix.

Everything is checked from the files' headers before a byte of data is read; what is never
used (the audio tower, the K and V projections of layers that borrow) is left unread
knowingly, and anything else unexpected is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from darkbloom_core.checkpoint import Weights, check_tensors
from darkbloom_core.contracts import Progress
from darkbloom_core.errors import CheckpointError
from darkbloom_gemma4._config import Gemma4Config, LayerConfig
from darkbloom_gemma4._quantization import TEXT_PREFIXES, Scheme
from darkbloom_gemma4._vision_weights import vision_matrices, vision_vectors

if TYPE_CHECKING:
    import mlx.core as mx

_TOWER = re.compile(
    r"(model\.)?((vision_tower|embed_vision)|vision_embedder|audio_tower|embed_audio|multi_modal_projector)\."
)
_HEAD = "lm_head"
_FLOATS = {"F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A module with a weight ``[..., rows, columns]`` that may be quantised along its columns."""

    shape: tuple[int, ...]


def matrices(config: Gemma4Config) -> dict[str, Matrix]:
    """Every module of the text model that has a matrix, by its name."""
    hidden = config.hidden_size
    found = {"embed_tokens": Matrix((config.vocab_size, hidden))}
    if not config.tied:
        found[_HEAD] = Matrix((config.vocab_size, hidden))
    if config.per_layer_size:
        packed = len(config.layers) * config.per_layer_size
        found["embed_tokens_per_layer"] = Matrix((config.per_layer_vocab_size, packed))
        found["per_layer_model_projection"] = Matrix((packed, hidden))
    for index, layer in enumerate(config.layers):
        for name, shape in _layer_matrices(config, layer):
            found[f"layers.{index}.{name}"] = Matrix(shape)
    return found


def _layer_matrices(config: Gemma4Config, layer: LayerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, q_size, kv_size = (
        config.hidden_size,
        config.heads * layer.head_dim,
        layer.kv_heads * layer.head_dim,
    )
    yield "self_attn.q_proj", (q_size, hidden)
    yield "self_attn.o_proj", (hidden, q_size)
    if layer.source is None:
        yield "self_attn.k_proj", (kv_size, hidden)
        if not layer.k_equals_v:
            yield "self_attn.v_proj", (kv_size, hidden)
    yield "mlp.gate_proj", (layer.mlp_size, hidden)
    yield "mlp.up_proj", (layer.mlp_size, hidden)
    yield "mlp.down_proj", (hidden, layer.mlp_size)
    if config.per_layer_size:
        yield "per_layer_input_gate", (config.per_layer_size, hidden)
        yield "per_layer_projection", (hidden, config.per_layer_size)
    if config.experts is not None:
        count, size = config.experts.count, config.experts.size
        yield "router.proj", (count, hidden)
        yield "experts.switch_glu.gate_proj", (count, size, hidden)
        yield "experts.switch_glu.up_proj", (count, size, hidden)
        yield "experts.switch_glu.down_proj", (count, hidden, size)


def vectors(config: Gemma4Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that are never quantised."""
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,)}
    if config.per_layer_size:
        found["per_layer_projection_norm.weight"] = (config.per_layer_size,)
    norms = [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    if config.per_layer_size:
        norms.append("post_per_layer_input_norm")
    if config.experts is not None:
        norms += [
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ]
    for index, layer in enumerate(config.layers):
        place = f"layers.{index}."
        found |= {f"{place}{norm}.weight": (hidden,) for norm in norms}
        found[f"{place}layer_scalar"] = (1,)
        found[f"{place}self_attn.q_norm.weight"] = (layer.head_dim,)
        if layer.source is None:
            found[f"{place}self_attn.k_norm.weight"] = (layer.head_dim,)
        if config.experts is not None:
            found[f"{place}router.scale"] = (hidden,)
            found[f"{place}router.per_expert_scale"] = (config.experts.count,)
    return found


@dataclass(frozen=True, slots=True)
class Tensors:
    """A checkpoint's tensors, checked. ``names`` has ours of each that is read; ``schemes`` the modules that are quantised."""

    weights: Weights
    config: Gemma4Config
    names: dict[str, str]
    schemes: dict[str, Scheme]

    def load(self, progress: Progress | None) -> dict[str, mx.array]:
        """Arrays by the one naming, evaluated, floating-point ones in the model's dtype."""
        import mlx.core as mx

        dtype = getattr(mx, self.config.dtype)
        arrays = self.weights.load(progress, want=self.names.__contains__)
        loaded: dict[str, mx.array] = {}
        for source in list(arrays):
            array = arrays.pop(source)
            if mx.issubdtype(array.dtype, mx.floating):
                array = array.astype(dtype)
            target = self.names[source]
            if target.endswith("experts.gate_up_proj"):
                place = target.removesuffix("gate_up_proj") + "switch_glu."
                gate, up = mx.split(array, 2, axis=-2)
                loaded[f"{place}gate_proj.weight"] = mx.contiguous(gate)
                loaded[f"{place}up_proj.weight"] = mx.contiguous(up)
                mx.eval(loaded[f"{place}gate_proj.weight"], loaded[f"{place}up_proj.weight"])
                del gate, up
            elif target.endswith("experts.down_proj"):
                loaded[target.removesuffix("down_proj") + "switch_glu.down_proj.weight"] = array
            else:
                loaded[target] = array
            mx.eval(array)
            del array
        mx.clear_cache()
        return loaded


def open_tensors(path: Path, config: Gemma4Config) -> Tensors:
    """Open the checkpoint folder ``path`` and check names, shapes and dtypes of the tensors.

    The vision tower is expected if any of its tensors is there: conversions for text alone
    leave it out. Raises ``CheckpointError`` naming up to ten tensors at fault.
    """
    weights = Weights(path)
    prefix = next(
        (each for each in TEXT_PREFIXES if f"{each}norm.weight" in weights.tensors), _usual_prefix(weights)
    )
    names = _names(weights, config, prefix)
    source_of = {target: name for name, target in names.items()}
    shapes, expected = dict(matrices(config)), dict(vectors(config))
    sees = config.vision is not None and any(map(_of_vision, weights.tensors))
    if config.vision is not None and sees:
        shapes |= {
            module: Matrix(shape)
            for module, shape in vision_matrices(config.vision, config.hidden_size).items()
        }
        expected |= vision_vectors(config.vision)
    schemes: dict[str, Scheme] = {}
    quantized_tensors: set[str] = set()
    for module, matrix in shapes.items():
        scheme = config.quantization.of(module) if config.quantization is not None else None
        if scheme is not None and f"{module}.scales" in source_of:
            schemes[module] = scheme
            parts = _quantized_shapes(module, matrix.shape, scheme)
            expected |= parts
            quantized_tensors |= parts.keys()
        else:
            expected[f"{module}.weight"] = matrix.shape
    _expect_fused_experts(config, expected, source_of)
    check_tensors(
        {source_of.get(target, _probable_name(target, prefix)): shape for target, shape in expected.items()},
        {name: weights.tensors[name].shape for name in names},
        path,
    )
    for name, target in names.items():
        found = weights.tensors[name]
        if target not in quantized_tensors and found.dtype not in _FLOATS:
            raise CheckpointError(
                f"{found.file}: tensor {name} has dtype {found.dtype}, which is not a floating-point one"
            )
    _check_promise(config, schemes, weights)
    return Tensors(weights, config, names, schemes)


def _names(weights: Weights, config: Gemma4Config, prefix: str) -> dict[str, str]:
    """Our name of each tensor that is read."""
    borrowers = {index for index, layer in enumerate(config.layers) if layer.source is not None}
    names = {}
    for name in weights.tensors:
        if _TOWER.match(name) is not None:
            if config.vision is not None and _of_vision(name):
                names[name] = name.removeprefix("model.")
            continue
        target = _target(name, prefix)
        if not _never_used(target, borrowers):
            names[name] = target
    return names


def _of_vision(name: str) -> bool:
    match = _TOWER.match(name)
    return match is not None and match[3] is not None


def _usual_prefix(weights: Weights) -> str:
    return TEXT_PREFIXES[0] if any(map(_TOWER.match, weights.tensors)) else TEXT_PREFIXES[-1]


def _probable_name(target: str, prefix: str) -> str:
    """How a checkpoint of this layout would name a tensor that it lacks."""
    if _TOWER.match(target) is None:
        return prefix + target
    return f"model.{target}" if prefix == TEXT_PREFIXES[0] else target


def _target(name: str, prefix: str) -> str:
    """``name`` without the prefix; the head stands beside the text model, not in it."""
    head = re.fullmatch(rf"(language_model\.|model\.)*({_HEAD}\..+)", name)
    if head is not None:
        return head[2]
    return name.removeprefix(prefix) if name.startswith(prefix) else name


def _never_used(target: str, borrowers: set[int]) -> bool:
    """Buffers that older versions stored, and K and V projections of layers that borrow."""
    match = re.fullmatch(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..+", target)
    return ".rotary_emb." in f".{target}" or (match is not None and int(match[1]) in borrowers)


def _quantized_shapes(module: str, shape: tuple[int, ...], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    *rows, columns = shape
    shapes = {
        f"{module}.weight": (*rows, columns * scheme.bits // 32),
        f"{module}.scales": (*rows, columns // scheme.group_size),
    }
    if scheme.mode == "affine":
        shapes[f"{module}.biases"] = shapes[f"{module}.scales"]
    return shapes


def _expect_fused_experts(
    config: Gemma4Config, expected: dict[str, tuple[int, ...]], source_of: dict[str, str]
) -> None:
    """Where the file has a layer's experts as transformers writes them, expect those tensors instead."""
    if config.experts is None:
        return
    count, size, hidden = config.experts.count, config.experts.size, config.hidden_size
    for index in range(len(config.layers)):
        place = f"layers.{index}.experts."
        if f"{place}gate_up_proj" in source_of or f"{place}down_proj" in source_of:
            for name in ("gate_proj", "up_proj", "down_proj"):
                expected.pop(f"{place}switch_glu.{name}.weight", None)
            expected[f"{place}gate_up_proj"] = (count, 2 * size, hidden)
            expected[f"{place}down_proj"] = (count, hidden, size)


def _check_promise(config: Gemma4Config, schemes: dict[str, Scheme], weights: Weights) -> None:
    """The dtype of KV was promised from the config alone; the files must not make it another."""
    if not config.experts_are_quantized():
        return
    for index in range(len(config.layers)):
        for name in ("gate_proj", "up_proj", "down_proj"):
            module = f"layers.{index}.experts.switch_glu.{name}"
            if module not in schemes:
                raise CheckpointError(
                    f"{weights.path}: {module} is not quantised, although config.json says that it is"
                )
