"""What family authors share for mixtures of experts and packed matrices: choosing, running and mixing experts, fast linear layers."""

from darkbloom_core.experts._choice import choose_experts, mix
from darkbloom_core.experts._gated import gated_experts
from darkbloom_core.experts._linear import packed_linear

__all__ = ["choose_experts", "gated_experts", "mix", "packed_linear"]
