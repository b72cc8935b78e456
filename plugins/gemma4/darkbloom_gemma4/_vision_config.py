"""What ``vision_config`` says of the vision tower. Pure; defaults are those of ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass

from darkbloom_gemma4._fields import Fields

VISION_TYPE = "gemma4_vision"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A picture is cut into squares of ``patch_pixels``; ``pooling`` squared patches become one soft token.

    ``places`` is how many rows, and columns, of patches have a learned position.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    layer_count: int
    patch_pixels: int
    pooling: int
    places: int
    rope_theta: float
    norm_epsilon: float
    standardizes: bool
    clips: bool

    @property
    def patch_size(self) -> int:
        """Numbers in one patch: three colours a pixel."""
        return 3 * self.patch_pixels**2


def read_vision(outer: Fields) -> VisionConfig | None:
    """None if there is no tower, or one of a kind that is not known here (it is left unread then)."""
    fields = outer.table("vision_config")
    if fields is None or fields.get("model_type") not in (None, VISION_TYPE):
        return None
    rope = fields.table("rope_parameters")
    return VisionConfig(
        hidden_size=fields.integer("hidden_size", 768),
        heads=fields.integer("num_attention_heads", 12),
        kv_heads=fields.integer("num_key_value_heads", 12),
        head_dim=fields.integer("head_dim", 64),
        mlp_size=fields.integer("intermediate_size", 3072),
        layer_count=fields.integer("num_hidden_layers", 16),
        patch_pixels=fields.integer("patch_size", 16),
        pooling=fields.integer("pooling_kernel_size", 3),
        places=fields.integer("position_embedding_size", 10_240),
        rope_theta=100.0 if rope is None else rope.number("rope_theta", 100.0),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        standardizes=fields.boolean("standardize", False),
        clips=fields.boolean("use_clipped_linears", False),
    )
