"""What family authors share: reading a checkpoint's configs, weights, tokenizer and chat template.

Nothing here knows a model. Every fault of a checkpoint is a ``CheckpointError`` of one
line that names the file; no code from a checkpoint is ever run, except its chat
template, in a sandbox.
"""

from darkbloom_core.checkpoint._codec import TokenizerCodec
from darkbloom_core.checkpoint._config import read_config, read_generation_config, read_json
from darkbloom_core.checkpoint._packages import defer_package
from darkbloom_core.checkpoint._stops import read_stop_ids
from darkbloom_core.checkpoint._template import ChatTemplate
from darkbloom_core.checkpoint._tokenizer import TextTokenizer
from darkbloom_core.checkpoint._weights import TensorInfo, Weights, check_tensors

__all__ = [
    "ChatTemplate",
    "TensorInfo",
    "TextTokenizer",
    "TokenizerCodec",
    "Weights",
    "check_tensors",
    "defer_package",
    "read_config",
    "read_generation_config",
    "read_json",
    "read_stop_ids",
]
