"""What MLX computes in several kernels and one can do, for families to build layers of.

On CUDA each function here is one kernel: a decode step of few rows takes as long as its
kernels take to launch, about ten microseconds each. Elsewhere it is MLX's own operations.
"""

from darkbloom_core.fused._heads import normed_heads
from darkbloom_core.fused._residual import Term, residual_norms

__all__ = ["Term", "normed_heads", "residual_norms"]
