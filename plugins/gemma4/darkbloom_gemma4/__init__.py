"""Gemma 4 for darkbloom."""

from collections.abc import Sequence

from darkbloom_core.contracts import ModelFamily
from darkbloom_core.hookspecs import hookimpl

__all__ = ["api_version", "model_families"]

api_version = (1, 0)


@hookimpl
def model_families() -> Sequence[ModelFamily]:
    from darkbloom_gemma4._family import Gemma4Family

    return [Gemma4Family()]
