"""Writes the goldens of GPT-OSS: logits of ``transformers`` in float32, for checkpoints that the tests have too."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

REPOSITORY = Path(__file__).parents[2]
TESTS = REPOSITORY / "plugins/gpt_oss/tests"
GOLDEN = TESTS / "golden"
DEMO = REPOSITORY / "plugins/demo/darkbloom_demo/checkpoints/gpt-oss"

_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
)
_TURN = "<|start|>user<|message|>{}<|end|><|start|>assistant"
_FILLER = (
    "The old baker walked to the market. A young pilot painted a ladder in the garden. My doctor sold the "
    "violin before the storm. Every farmer found a lantern on Monday. The tall singer forgot the umbrella. "
)
DEMO_PROMPTS = (
    _SYSTEM + _TURN.format("What is the capital of France?"),
    _TURN.format("What is 47 + 38?")
    + "<|channel|>analysis<|message|>Ones: 7+8=15, write 5 carry 1. Tens: 4+3+1=8. Result 85.<|end|>"
    + "<|start|>assistant<|channel|>final<|message|>47 + 38 = 85<|return|>",
    _SYSTEM + _TURN.format(f"The secret word is marble. {_FILLER * 7}What is the secret word?"),
)

TIE = 3e-5
"""Two largest logits nearer than this, relative to the largest of all, have no arg-max worth comparing."""


def write_goldens() -> None:
    """Write every golden of this family. Fails if the reference does not read a layout whole, or is undecided."""
    GOLDEN.mkdir(exist_ok=True)
    _write_random()
    _write_demo()


def _write_random() -> None:
    checkpoints = _load_checkpoints()
    ids = checkpoints.prompt()
    found: dict[str, np.ndarray] = {}
    for layout in checkpoints.LAYOUTS:
        dense = checkpoints.dense_tensors(layout)
        found[f"yarn/{layout}"] = _logits(_reference(checkpoints, "yarn", dense), ids)
    for model in list(checkpoints.MODELS)[1:]:
        dense = checkpoints.dense_tensors("transformers")
        found[f"{model}/transformers"] = _logits(_reference(checkpoints, model, dense), ids)
    far_ids, positions = checkpoints.far_prompt()
    reference = _reference(checkpoints, "yarn", checkpoints.dense_tensors("transformers"))
    found["far"] = _logits(reference, far_ids)[positions]
    for layout in ("transformers", "transformers-4.57", "publisher"):
        _check_own_reading(checkpoints, layout, found[f"yarn/{layout}"], ids)
    for name, logits in found.items():
        _check_decided(name, logits)
    np.savez_compressed(GOLDEN / "random.npz", **found)


def _write_demo() -> None:
    """Logits at some positions only, since they are wide; the last is always among them."""
    reference = GptOssForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found: dict[str, np.ndarray] = {}
    for number, prompt in enumerate(DEMO_PROMPTS):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        positions = sorted({*range(0, len(ids), max(1, len(ids) // 24)), len(ids) - 1})
        logits = _logits(reference, ids)
        _check_decided(f"demo prompt {number}", logits)
        found[f"ids{number}"] = np.array(ids, np.int32)
        found[f"positions{number}"] = np.array(positions, np.int32)
        found[f"logits{number}"] = logits[positions]
        found[f"choices{number}"] = logits.argmax(-1).astype(np.int32)
    np.savez_compressed(GOLDEN / "demo.npz", **found)


def _reference(checkpoints: ModuleType, model: str, dense: dict[str, np.ndarray]) -> GptOssForCausalLM:
    fields = checkpoints.config(model, "transformers")
    reference = GptOssForCausalLM(GptOssConfig(**fields, attn_implementation="eager")).float().eval()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in dense.items()}
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        raise SystemExit(f"{model}: transformers misses {missing} and does not know {unexpected}")
    return reference


def _check_own_reading(checkpoints: ModuleType, layout: str, logits: np.ndarray, ids: list[int]) -> None:
    """Where transformers reads a layout itself, it must find the numbers that we took it to hold."""
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if layout == "publisher" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.write(Path(folder), "yarn", layout)
        read = GptOssForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", **options
        )
        difference = np.abs(_logits(read.eval().float(), ids) - logits).max() / np.abs(logits).max()
    print(f"{layout}: transformers' own reading differs by {difference:.1e} of the largest logit")
    if difference > TIE:
        raise SystemExit(f"{layout}: transformers reads other numbers than the golden's")


def _check_decided(name: str, logits: np.ndarray) -> None:
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    if (first - second).min() < TIE * np.abs(logits).max():
        raise SystemExit(f"{name}: the reference is undecided at position {(first - second).argmin()}")


@torch.no_grad()
def _logits(model: GptOssForCausalLM, ids: list[int]) -> np.ndarray:
    """``[tokens, vocabulary]``."""
    return model(torch.tensor([ids])).logits[0].float().numpy()


def _load_checkpoints() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_oss_checkpoints", TESTS / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
