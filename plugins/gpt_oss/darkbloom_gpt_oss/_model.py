"""GPT-OSS in memory: mlx-lm's modules for norms and linear layers, our own attention and choice of experts.

Attention asks the cache to attend, so it knows neither positions nor masks nor storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.utils import tree_flatten
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gpt_oss import Model, ModelArgs
from mlx_lm.models.switch_layers import SwitchLinear

from darkbloom_core.checkpoint import TextTokenizer, Weights, read_stop_ids
from darkbloom_core.contracts import Batch, Inputs, MediaEmbeddings, ModelDescription, Placement, Progress
from darkbloom_core.fused import Term, residual_norms
from darkbloom_gpt_oss._config import Format, GptOssConfig
from darkbloom_gpt_oss._experts import mix_experts
from darkbloom_gpt_oss._weights import LoadedWeights, load_weights

STOP_TOKENS = ("<|return|>", "<|call|>", "<|endoftext|>")


def load_model(
    path: Path,
    description: ModelDescription,
    config: GptOssConfig,
    placement: Placement,
    progress: Progress | None,
) -> LoadedGptOss:
    """Read the checkpoint at ``path``. Raises ``CheckpointError`` naming file or tensors."""
    tokenizer = TextTokenizer(path)
    stop_ids = read_stop_ids(path, description.config or {}, tokenizer, STOP_TOKENS)
    on_cpu = placement.device.kind == "cpu"
    weights = load_weights(Weights(path), config, config.compute_dtype(placement.device.kind), progress)
    return LoadedGptOss(description, config, build(config, weights), stop_ids, on_cpu)


def build(config: GptOssConfig, weights: LoadedWeights) -> Model:
    """mlx-lm's modules with ``weights`` in them, which are emptied."""
    model = Model(
        ModelArgs(
            num_hidden_layers=len(config.windows),
            num_local_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            head_dim=config.head_dim,
            num_attention_heads=config.q_heads,
            num_key_value_heads=config.kv_heads,
            # mlx-lm looks for one layer of each kind; its own masks and caches are never used
            layer_types=["sliding_attention", "full_attention"] * len(config.windows),
        )
    )

    def packing(path: str, _: Module) -> dict[str, Any] | bool:
        found: Format | None = weights.formats.get(path)
        if found is None:
            return False
        return {"group_size": found.group_size, "bits": found.bits, "mode": found.mode}

    quantize(model, class_predicate=packing)
    model.load_weights(list(weights.arrays.items()), strict=True)
    for layer in model.layers:
        layer.mlp.experts.activation = SwigluOAI(config.swiglu_alpha, config.swiglu_limit)
    weights.arrays.clear()
    return model


class LoadedGptOss:
    """The family's ``LoadedModel``."""

    vision = None

    def __init__(
        self,
        description: ModelDescription,
        config: GptOssConfig,
        model: Model,
        stop_ids: frozenset[int],
        on_cpu: bool,
    ) -> None:
        self.description = description
        self.stop_ids = stop_ids
        self._model = model
        self._config = config
        self._heads = (config.q_heads, config.kv_heads, config.head_dim)
        self._periods = mx.array(1.0 / config.rope.inverse_frequencies())
        self._qkv: list[_Fused] = []
        for layer in model.layers:
            attention = layer.self_attn
            self._qkv.append(_Fused([attention.pop(name) for name in ("q_proj", "k_proj", "v_proj")]))
            mx.eval(self._qkv[-1].arrays)
        if on_cpu:
            _lay_out_for_cpu(model)
        mx.eval(self._periods, _arrays_of(model))
        mx.clear_cache()

    @property
    def weight_bytes(self) -> int:
        """Bytes of every array that the model holds."""
        held = _arrays_of(self._model)
        held += [array for fused in self._qkv for array in fused.arrays]
        return sum(array.nbytes for array in held)

    def embed(self, ids: mx.array, media: MediaEmbeddings | None = None) -> Inputs:
        """``ids`` ``[B, L]`` to hidden states ``[B, L, H]``. There is nothing to see, so ``media`` is None."""
        assert media is None
        return (self._model.model.embed_tokens(ids),)

    def run_layers(self, inputs: Inputs, batch: Batch, first: int, last: int) -> Inputs:
        """Layers ``first`` to ``last - 1`` of hidden states ``[B, L, H]``."""
        (hidden,) = inputs
        layers, epsilon = self._model.model.layers, self._config.rms_norm_eps
        (_, normed) = residual_norms(
            hidden, [], epsilon=epsilon, norms=[layers[first].input_layernorm.weight]
        )
        for index in range(first, last):
            layer = layers[index]
            attended = Term(self._attend(index, normed, batch))
            weight = layer.post_attention_layernorm.weight
            hidden, normed = residual_norms(hidden, [attended], epsilon=epsilon, norms=[weight])
            following = [layers[index + 1].input_layernorm.weight] if index + 1 < last else []
            mixed = Term(mix_experts(layer.mlp, normed))
            hidden, *norms = residual_norms(hidden, [mixed], epsilon=epsilon, norms=following)
            normed = norms[0] if norms else normed
        return (hidden,)

    def logits(self, hidden: mx.array) -> mx.array:
        """``[B, 1, H]`` to ``[B, vocab_size]``."""
        logits: mx.array = self._model.lm_head(self._model.model.norm(hidden[:, -1]))
        return logits

    def mlx_lm_model(self) -> Model:
        """The same weights in mlx-lm's class, for benchmarks."""
        from darkbloom_gpt_oss._peer import mlx_lm_model

        fused = [(each.arrays, each.packing) for each in self._qkv]
        return mlx_lm_model(self._model, fused, self._config)

    def _attend(self, index: int, hidden: mx.array, batch: Batch) -> mx.array:
        """Queries, keys and values come from one matmul; queries and keys are rotated together."""
        q_heads, kv_heads, head_dim = self._heads
        rows, length, _ = hidden.shape
        attention = self._model.model.layers[index].self_attn
        heads = self._qkv[index](hidden).reshape(rows, length, -1, head_dim).swapaxes(1, 2)
        rotated = mx.fast.rope(
            heads[:, : q_heads + kv_heads],
            head_dim,
            traditional=False,
            base=None,
            scale=1.0,
            offset=batch.offsets,
            freqs=self._periods,
        )
        attended = batch.caches[index].attend(
            rotated[:, :q_heads], rotated[:, q_heads:], heads[:, q_heads + kv_heads :], sinks=attention.sinks
        )
        projected: mx.array = attention.o_proj(attended.swapaxes(1, 2).reshape(rows, length, -1))
        return projected


class _Fused:
    """Linear layers with one input as one matmul, where they are packed alike."""

    def __init__(self, modules: Sequence[Module]) -> None:
        def joined(name: str) -> mx.array:
            return mx.concatenate([module[name] for module in modules])

        self.packing = _packing(modules[0])
        self.arrays: list[mx.array]
        self._apply: Callable[[mx.array], mx.array]
        first = modules[0]
        if all(isinstance(module, Linear) for module in modules):
            self.arrays = [mx.contiguous(joined("weight").T), joined("bias")]
            self._apply = lambda x: mx.addmm(self.arrays[1], x, self.arrays[0])
        elif len({_packing(module) for module in modules}) == 1:
            names = [name for name in ("weight", "scales", "bias", "biases") if name in first]
            self.arrays = [joined(name) for name in names]
            self._apply = lambda x: self._quantised(x, cast(QuantizedLinear, first))
        else:
            self.arrays = [array for module in modules for array in _arrays_of(module)]
            self._apply = lambda x: mx.concatenate([module(x) for module in modules], axis=-1)

    def __call__(self, x: mx.array) -> mx.array:
        return self._apply(x)

    def _quantised(self, x: mx.array, module: QuantizedLinear) -> mx.array:
        weight, scales, bias, *biases = self.arrays
        product = mx.quantized_matmul(
            x,
            weight,
            scales,
            biases[0] if biases else None,
            transpose=True,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        return product + bias


def _arrays_of(module: Module) -> list[mx.array]:
    parameters = module.parameters()  # type: ignore[no-untyped-call]  # MLX leaves it unannotated
    return [array for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(parameters))]


def _packing(module: Module) -> tuple[str, int, int] | None:
    if isinstance(module, QuantizedLinear):
        return module.mode, module.bits, module.group_size
    return None


def _lay_out_for_cpu(model: Model) -> None:
    """Store plain matrices input dimension first: the CPU backend multiplies by them nearly twice as fast."""
    modules = [model.lm_head]
    for layer in model.layers:
        experts = layer.mlp.experts
        modules += [layer.self_attn.o_proj, layer.mlp.router]
        modules += [experts.gate_proj, experts.up_proj, experts.down_proj]
    for module in modules:
        if isinstance(module, (Linear, SwitchLinear)):
            module.weight = mx.contiguous(module.weight.swapaxes(-1, -2)).swapaxes(-1, -2)
            mx.eval(module.weight)
