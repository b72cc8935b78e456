"""Writes the goldens of the example family Qwen3: logits of ``transformers`` in float32.

The checkpoints are those that the example's tests make. Logits at some positions only,
since all of them would be megabytes; the arg-max at every position.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TESTS = Path(__file__).parents[2] / "examples/darkbloom-qwen3/tests"
GOLDEN = TESTS / "golden"
EDGES = (0, 256, 512, 768, 1024, 1300)
"""Logits are kept around these positions: the ends of the prompt and of the engine's chunks."""

TIE = 2e-5
"""Two largest logits nearer than this, relative to the largest of all, could change places within the tolerance."""


def write_goldens() -> None:
    """Write ``logits.npz``. Fails if the reference does not read a layout whole, or is undecided somewhere."""
    checkpoints = _load_checkpoints()
    ids = checkpoints.prompt()
    near = {position for edge in EDGES for position in range(edge - 3, edge + 3)}
    positions = sorted(near & set(range(len(ids))))
    found = {"positions": np.array(positions, np.int32)}
    for layout in checkpoints.LAYOUTS:
        logits = _logits(_reference(checkpoints, layout), ids)
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        if (first - second).min() < TIE * np.abs(logits).max():
            raise SystemExit(f"{layout}: the reference is undecided at position {(first - second).argmin()}")
        found[f"{layout}_logits"] = logits[positions]
        found[f"{layout}_choices"] = logits.argmax(-1).astype(np.int32)
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / "logits.npz", **found)


def _reference(checkpoints: ModuleType, layout: str) -> Qwen3ForCausalLM:
    fields = {name: value for name, value in checkpoints.config(layout).items() if "quantization" not in name}
    model = Qwen3ForCausalLM(Qwen3Config(**fields, attn_implementation="eager")).float().eval()
    tensors = {name: torch.from_numpy(each) for name, each in checkpoints.dense_tensors(layout).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    allowed = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    if list(missing) != allowed or unexpected:
        raise SystemExit(f"{layout}: transformers misses {missing} and does not know {unexpected}")
    model.tie_weights()
    return model


@torch.no_grad()
def _logits(model: Qwen3ForCausalLM, ids: list[int]) -> np.ndarray:
    """``[tokens, vocabulary]``."""
    return model(torch.tensor([ids])).logits[0].numpy()


def _load_checkpoints() -> ModuleType:
    spec = importlib.util.spec_from_file_location("qwen3_checkpoints", TESTS / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
