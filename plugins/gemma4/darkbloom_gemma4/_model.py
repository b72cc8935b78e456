"""The text model: the reference's computation over the core's caches.

Linear, norm and embedding modules are MLX's, the gathered experts mlx-lm's; the forward
pass is written here, because positions, masks and KV belong to the core, and evaluates
nothing. Imported only by ``load``.
"""

# mypy: disable-error-code="no-untyped-call"
# because the constructors of MLX's modules have no annotations

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.switch_layers import SwitchGLU

from darkbloom_core.contracts import Batch, Inputs, LayerCache, MediaEmbeddings, ModelDescription
from darkbloom_core.experts import choose_experts, gated_experts, mix, packed_linear
from darkbloom_core.fused import Term, normed_heads, residual_norms
from darkbloom_gemma4._config import ExpertsConfig, Gemma4Config, LayerConfig
from darkbloom_gemma4._processor import Processor
from darkbloom_gemma4._quantization import Scheme
from darkbloom_gemma4._rope import periods
from darkbloom_gemma4._seam import PARTS_ON_CPU, Gemma4Vision
from darkbloom_gemma4._vision import Vision
from darkbloom_gemma4._vision_weights import PROJECTION, TOWER


def _linear(columns: int, rows: int) -> Linear:
    return Linear(columns, rows, bias=False)


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    gated: mx.array = gelu_approx(gate) * up
    return gated


class ExpertActivation(Module):
    """In the argument order of mlx-lm's experts."""

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return _gated(gate, up)


class Attention(Module):
    def __init__(self, config: Gemma4Config, layer: LayerConfig) -> None:
        super().__init__()
        self._layer = layer
        self._norm_epsilon = config.norm_epsilon
        self._periods = mx.array(
            periods(config.sliding_rotary if layer.sliding else config.full_rotary, layer.head_dim)
        )
        hidden, head_dim = config.hidden_size, layer.head_dim
        self.q_proj = _linear(hidden, config.heads * head_dim)
        self.o_proj = _linear(config.heads * head_dim, hidden)
        self.q_norm = RMSNorm(head_dim, eps=config.norm_epsilon)
        if layer.source is None:
            self.k_proj = _linear(hidden, layer.kv_heads * head_dim)
            self.k_norm = RMSNorm(head_dim, eps=config.norm_epsilon)
            if not layer.k_equals_v:
                self.v_proj = _linear(hidden, layer.kv_heads * head_dim)

    def __call__(self, x: mx.array, offsets: mx.array, cache: LayerCache) -> mx.array:
        batch, length, _ = x.shape
        k = v = None
        if self._layer.source is None:
            k = packed_linear(self.k_proj, x)
            v = k if self._layer.k_equals_v else packed_linear(self.v_proj, x)
        q, k, v = normed_heads(
            packed_linear(self.q_proj, x),
            k,
            v,
            self._layer.head_dim,
            offsets,
            self._periods,
            query_weight=self.q_norm.weight,
            key_weight=None if k is None else self.k_norm.weight,
            epsilon=self._norm_epsilon,
        )
        out = cache.attend(q, k, v)
        return packed_linear(self.o_proj, out.swapaxes(1, 2).reshape(batch, length, -1))


class DenseMlp(Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, size)
        self.up_proj = _linear(hidden, size)
        self.down_proj = _linear(size, hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return packed_linear(
            self.down_proj, _gated(packed_linear(self.gate_proj, x), packed_linear(self.up_proj, x))
        )


class Router(Module):
    """Chooses experts: norm, scale by ``hidden ** -0.5``, project, softmax in float32, the largest, summing to 1."""

    def __init__(self, config: Gemma4Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self._chosen = experts.chosen
        self._scaling = config.hidden_size**-0.5
        self._norm_weight: mx.array | None = None
        self.proj = _linear(config.hidden_size, experts.count)
        self.scale = mx.ones((config.hidden_size,))
        self.per_expert_scale = mx.ones((experts.count,))

    def prepare(self) -> None:
        """After its parameters are there. Evaluated, since another thread may run the model."""
        self._norm_weight = self.scale * self._scaling
        mx.eval(self._norm_weight)

    @property
    def norm_weight(self) -> mx.array:
        """``[H]``: of the norm that ``x`` has gone through, the scaling included."""
        assert self._norm_weight is not None, "prepare first"
        return self._norm_weight

    def __call__(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """``normed`` ``[T, H]``: indices and weights, each ``[T, chosen]``."""
        return choose_experts(packed_linear(self.proj, normed), self._chosen, self.per_expert_scale)


class Experts(Module):
    def __init__(self, hidden: int, experts: ExpertsConfig) -> None:
        super().__init__()
        self.switch_glu = SwitchGLU(
            hidden, experts.size, experts.count, activation=ExpertActivation(), bias=False
        )

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``x`` ``[T, H]``; ``indices`` and ``weights`` ``[T, chosen]``: ``[T, H]``."""
        return mix(gated_experts(self.switch_glu, x, indices), weights)


class DecoderLayer(Module):
    def __init__(self, config: Gemma4Config, layer: LayerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config, layer)
        self.mlp = DenseMlp(hidden, layer.mlp_size)
        self.layer_scalar = mx.ones((1,))
        norms = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        self._epsilon = config.norm_epsilon
        self._has_experts = config.experts is not None
        if config.experts is not None:
            self.router = Router(config, config.experts)
            self.experts = Experts(hidden, config.experts)
            norms += [
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ]
        if config.per_layer_size:
            self.per_layer_input_gate = _linear(hidden, config.per_layer_size)
            self.per_layer_projection = _linear(config.per_layer_size, hidden)
            norms.append("post_per_layer_input_norm")
        for name in norms:
            setattr(self, name, RMSNorm(hidden, eps=config.norm_epsilon))

    def __call__(
        self,
        x: mx.array,
        normed: mx.array,
        per_layer_input: mx.array | None,
        offsets: mx.array,
        cache: LayerCache,
        following: Sequence[mx.array],
    ) -> tuple[mx.array, ...]:
        """``x`` ``[B, L, H]`` and its input norm, and this layer's own input ``[B, L, P]``, or None in models without one.

        Gives what the next layer gets: ``x``, and its norms of the weights ``following``.
        """
        attended = Term(self.self_attn(normed, offsets, cache))
        weights = [self.pre_feedforward_layernorm.weight]
        if self._has_experts:
            weights += [self.pre_feedforward_layernorm_2.weight, self.router.norm_weight]
        after = self.post_attention_layernorm.weight
        x, normed, *others = residual_norms(x, [attended], weight=after, epsilon=self._epsilon, norms=weights)
        found = [Term(self.mlp(normed))]
        if self._has_experts:
            of_experts, of_router = (each.reshape(-1, x.shape[-1]) for each in others)
            chosen = self.experts(of_experts, *self.router(of_router)).reshape(x.shape)
            found = [
                Term(found[0].value, self.post_feedforward_layernorm_1.weight),
                Term(chosen, self.post_feedforward_layernorm_2.weight),
            ]
        after = self.post_feedforward_layernorm.weight
        if per_layer_input is None:
            return residual_norms(
                x, found, weight=after, epsilon=self._epsilon, scalar=self.layer_scalar, norms=following
            )
        (x,) = residual_norms(x, found, weight=after, epsilon=self._epsilon)
        gated = _gated(self.per_layer_input_gate(x), per_layer_input)
        own = [Term(self.per_layer_projection(gated))]
        after = self.post_per_layer_input_norm.weight
        return residual_norms(
            x, own, weight=after, epsilon=self._epsilon, scalar=self.layer_scalar, norms=following
        )


class TextModel(Module):
    """Parameters are named as MLX conversions name them, without a prefix."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self._config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, layer) for layer in config.layers]
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        if not config.tied:
            self.lm_head = _linear(config.hidden_size, config.vocab_size)
        if config.per_layer_size:
            packed = len(config.layers) * config.per_layer_size
            self.embed_tokens_per_layer = Embedding(config.per_layer_vocab_size, packed)
            self.per_layer_model_projection = _linear(config.hidden_size, packed)
            self.per_layer_projection_norm = RMSNorm(config.per_layer_size, eps=config.norm_epsilon)

    def embed(self, ids: mx.array) -> mx.array:
        """``[B, L, H]``."""
        x: mx.array = self._look_up(self.embed_tokens, ids) * self._config.hidden_size**0.5
        return x

    def _look_up(self, embedding: Embedding, ids: mx.array) -> mx.array:
        """In the model's dtype: a table in one of the MX formats answers in bfloat16 whatever the model is in."""
        found: mx.array = embedding(ids).astype(getattr(mx, self._config.dtype))
        return found

    def per_layer_inputs(self, ids: mx.array, x: mx.array) -> mx.array:
        """``[B, L, layers, P]``: what each layer is told about each token, from its id and its embedding ``x``."""
        config = self._config
        shape = (*ids.shape, len(config.layers), config.per_layer_size)
        of_token = self._look_up(self.embed_tokens_per_layer, ids) * config.per_layer_size**0.5
        of_embedding = self.per_layer_model_projection(x) * config.hidden_size**-0.5
        normed = self.per_layer_projection_norm(of_embedding.reshape(shape))
        inputs: mx.array = (normed + of_token.reshape(shape)) * 2**-0.5
        return inputs

    def head(self, x: mx.array) -> mx.array:
        """Normed hidden states to logits, soft cap included."""
        logits = packed_linear(self.embed_tokens if self._config.tied else self.lm_head, x)
        softcap = self._config.softcap
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap


class LoadedGemma4:
    """A ``LoadedModel``. See the contract for each method. ``tower`` is what ``vision`` looks through."""

    def __init__(
        self,
        description: ModelDescription,
        config: Gemma4Config,
        arrays: dict[str, mx.array],
        schemes: dict[str, Scheme],
        stop_ids: frozenset[int],
        processor: Processor | None = None,
    ) -> None:
        """``processor`` None: the publisher's defaults. ``arrays`` is emptied: the model owns them from here on."""
        self.description = description
        self.stop_ids = stop_ids
        self.weight_bytes = sum(array.nbytes for array in arrays.values())
        self._config = config
        self.tower: Vision | None = None
        self.vision: Gemma4Vision | None = None
        seen = {name: arrays.pop(name) for name in list(arrays) if name.startswith((TOWER, PROJECTION))}
        if seen and config.vision is not None:
            self.tower = Vision(config.vision, config.hidden_size)
            _fill(self.tower, seen, schemes)
            parts = 1 if mx.metal.is_available() or mx.cuda.is_available() else PARTS_ON_CPU
            self.vision = Gemma4Vision(self.tower, processor or Processor.of(config.vision), parts)
        self._model = TextModel(config)
        _fill(self._model, arrays, schemes)
        for layer in self._model.layers:
            if config.experts is not None:
                layer.router.prepare()

    def embed(self, ids: mx.array, media: MediaEmbeddings | None = None) -> Inputs:
        model, config = self._model, self._config
        media = media or MediaEmbeddings((), ())
        if media.spans:
            ids = mx.array(ids)  # a copy, for the caller's own is not ours to write into
        for span in media.spans:
            ids[:, span.start : span.start + span.length] = config.pad_token
        x = model.embed(ids)
        for span, embeddings in zip(media.spans, media.embeddings, strict=True):
            x[:, span.start : span.start + span.length] = embeddings.astype(x.dtype)
        return (x, model.per_layer_inputs(ids, x)) if config.per_layer_size else (x,)

    def run_layers(self, inputs: Inputs, batch: Batch, first: int, last: int) -> Inputs:
        x, *others = inputs
        layers, epsilon = self._model.layers, self._config.norm_epsilon
        x, *norms = residual_norms(x, [], epsilon=epsilon, norms=[layers[first].input_layernorm.weight])
        for index in range(first, last):
            own = others[0][:, :, index] if others else None
            following = [layers[index + 1].input_layernorm.weight] if index + 1 < last else []
            x, *norms = layers[index](x, norms[0], own, batch.offsets, batch.caches[index], following)
        return (x, *others)

    def logits(self, hidden: mx.array) -> mx.array:
        return self._model.head(self._model.norm(hidden))[:, -1]

    def mlx_lm_model(self) -> Module:
        """The same weights in mlx-lm's class, for benchmarks."""
        from darkbloom_gemma4._peer import mlx_lm_model

        return mlx_lm_model(self._model, self._config)


def _fill(module: Module, arrays: dict[str, mx.array], schemes: dict[str, Scheme]) -> None:
    """Give ``module`` its parameters, all of them and no other; ``arrays`` is emptied."""
    quantize(module, class_predicate=lambda name, _: _as_arguments(schemes.get(name)))
    module.load_weights(list(arrays.items()), strict=True)
    arrays.clear()
    module.freeze()


def _as_arguments(scheme: Scheme | None) -> bool | dict[str, Any]:
    if scheme is None:
        return False
    return {"group_size": scheme.group_size, "bits": scheme.bits, "mode": scheme.mode}
