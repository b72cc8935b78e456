"""Names and shapes of the vision tower's tensors, by the one naming that ``_weights`` brings every layout to."""

from __future__ import annotations

from darkbloom_gemma4._vision_config import VisionConfig

TOWER, PROJECTION = "vision_tower", "embed_vision"

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def vision_matrices(config: VisionConfig, text_hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Modules with a matrix, and its shape."""
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {
        f"{TOWER}.patch_embedder.input_proj": (hidden, config.patch_size),
        f"{PROJECTION}.embedding_projection": (text_hidden_size, hidden),
    }
    for index in range(config.layer_count):
        found |= {f"{name}.linear": shape for name, shape in _linears(config, index).items()}
    return found


def vision_vectors(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that are never quantised, and their shapes."""
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {
        f"{TOWER}.patch_embedder.position_embedding_table": (2, config.places, hidden)
    }
    if config.standardizes:
        found |= {f"{TOWER}.std_bias": (hidden,), f"{TOWER}.std_scale": (hidden,)}
    for index in range(config.layer_count):
        place = f"{TOWER}.encoder.layers.{index}."
        found |= {f"{place}{norm}_layernorm.weight": (hidden,) for norm in _NORMS}
        found |= {f"{place}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        if config.clips:
            found |= {f"{name}.{bound}": () for name in _linears(config, index) for bound in _BOUNDS}
    return found


def _linears(config: VisionConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The matrices of one layer; each may have its inputs and outputs clipped."""
    hidden, place = config.hidden_size, f"{TOWER}.encoder.layers.{index}."
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        f"{place}self_attn.q_proj": (q_size, hidden),
        f"{place}self_attn.k_proj": (kv_size, hidden),
        f"{place}self_attn.v_proj": (kv_size, hidden),
        f"{place}self_attn.o_proj": (hidden, q_size),
        f"{place}mlp.gate_proj": (config.mlp_size, hidden),
        f"{place}mlp.up_proj": (config.mlp_size, hidden),
        f"{place}mlp.down_proj": (hidden, config.mlp_size),
    }
