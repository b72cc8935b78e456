"""Writes the goldens of Gemma 4: logits of ``transformers`` in float32, for checkpoints that the tests have too."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration

REPOSITORY = Path(__file__).parents[2]
TESTS = REPOSITORY / "plugins/gemma4/tests"
GOLDEN = TESTS / "golden"
DEMO = REPOSITORY / "plugins/demo/darkbloom_demo/checkpoints/gemma4"

_TURN = "<|turn>user\n{}<turn|>\n<|turn>model\n"
_FILLER = (
    "The old baker walked to the market. A young pilot painted a ladder in the garden. My doctor sold the "
    "violin before the storm. Every farmer found a lantern on Monday. The tall singer forgot the umbrella. "
)
DEMO_PROMPTS = (
    "<bos>" + _TURN.format("What is the capital of France?"),
    "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n" + _TURN.format("What is 47 + 38?"),
    "<bos>" + _TURN.format(f"The secret word is marble. {_FILLER * 6}What is the secret word?"),
)
LAYOUTS_OF_TRANSFORMERS = ("publisher", "transformers", "transformers-text")
SAME_WITHIN = 1e-4
"""How far apart the reference's own answers for two layouts of one checkpoint may be."""


def write_goldens() -> None:
    """Write every golden of this family. Fails if the reference does not read a layout whole."""
    GOLDEN.mkdir(exist_ok=True)
    _write_random()
    _write_demo()
    _write_pictures()


def _write_random() -> None:
    checkpoints = _load_checkpoints()
    found: dict[str, np.ndarray] = {}
    for model in checkpoints.MODELS:
        answers = []
        for layout in LAYOUTS_OF_TRANSFORMERS:
            with tempfile.TemporaryDirectory() as folder:
                reference = _load(checkpoints.write(Path(folder), model, layout))
            answers.append(np.concatenate([_logits(reference, prompt) for prompt in checkpoints.prompts()]))
        for answer in answers[1:]:
            if np.abs(answer - answers[0]).max() > SAME_WITHIN:
                raise SystemExit(f"{model}: transformers answers two layouts differently")
        found[model] = answers[0]
    np.savez_compressed(GOLDEN / "random.npz", **found)


def _write_demo() -> None:
    """Logits at some positions only, since they are wide; the last is always among them."""
    reference, tokenizer = _load(DEMO), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found: dict[str, np.ndarray] = {}
    for number, prompt in enumerate(DEMO_PROMPTS):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        positions = sorted({*range(0, len(ids), max(1, len(ids) // 24)), len(ids) - 1})
        found[f"ids{number}"] = np.array(ids, np.int32)
        found[f"positions{number}"] = np.array(positions, np.int32)
        found[f"logits{number}"] = _logits(reference, ids)[positions]
    np.savez_compressed(GOLDEN / "demo.npz", **found)


def _write_pictures() -> None:
    """Soft tokens of random pictures of two sizes, the smaller one padded."""
    checkpoints = _load_checkpoints()
    found: dict[str, np.ndarray] = {}
    for name, sizes in checkpoints.PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            reference = _load(DEMO if name == "demo" else checkpoints.write(Path(folder), name, "publisher"))
        patches, positions = map(torch.tensor, checkpoints.pictures(sizes))
        with torch.no_grad():
            features = reference.model.get_image_features(patches, positions, return_dict=True).pooler_output
        found |= {f"{name}{number}": each.float().numpy() for number, each in enumerate(features)}
    np.savez_compressed(GOLDEN / "pictures.npz", **found)


def _load(folder: Path) -> Any:
    text_only = '"Gemma4ForCausalLM"' in (folder / "config.json").read_text()
    family = Gemma4ForCausalLM if text_only else Gemma4ForConditionalGeneration
    model, report = family.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(report.values()):
        raise SystemExit(f"{folder}: transformers does not read it whole: {report}")
    return model.eval()


@torch.no_grad()
def _logits(model: Any, ids: list[int]) -> np.ndarray:
    """``[tokens, vocabulary]``."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if isinstance(model, Gemma4ForConditionalGeneration):
        inputs["mm_token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.long)
    return model(**inputs).logits[0].float().numpy()


def _load_checkpoints() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gemma4_checkpoints", TESTS / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
