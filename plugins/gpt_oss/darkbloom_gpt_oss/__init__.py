"""GPT-OSS for darkbloom: gpt-oss-20b, gpt-oss-120b and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from darkbloom_core.contracts import ModelFamily
from darkbloom_core.hookspecs import hookimpl

api_version = (1, 0)


@hookimpl
def model_families() -> Sequence[ModelFamily]:
    """The one family of this plugin."""
    from darkbloom_gpt_oss._family import GptOss

    return [GptOss()]
