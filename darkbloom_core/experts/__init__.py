"""What family authors share for mixtures of experts: a gated feed-forward block of the experts that each token chose."""

from darkbloom_core.experts._gated import gated_experts

__all__ = ["gated_experts"]
