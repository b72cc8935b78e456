"""Writes the goldens of Gemma 4: logits of ``transformers`` in float32, for checkpoints that the tests have too."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

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
STRIDE = 997
"""Of the values in patches every so many-th is kept."""

SAME_WITHIN = 1e-4
"""How far apart the reference's own answers for two layouts of one checkpoint may be."""


def write_goldens() -> None:
    """Write every golden of this family. Fails if the reference does not read a layout whole."""
    GOLDEN.mkdir(exist_ok=True)
    _write_random()
    _write_demo()
    _write_pictures()
    _write_processor()
    _write_media()
    _write_demo_media()


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


def _write_processor() -> None:
    """Of each picture: the shape of the grid of patches, and some of the values in them."""
    checkpoints = _load_checkpoints()
    found: dict[str, np.ndarray] = {}
    for number, (height, width) in enumerate(checkpoints.PHOTOGRAPHS):
        for most in (70, 280):
            made = _patches([checkpoints.photograph(height, width)], most)
            count = int(made["num_soft_tokens_per_image"][0]) * 9
            positions = made["image_position_ids"][0][:count]
            found[f"grid{number} {most}"] = positions[-1].numpy() + 1
            found[f"values{number} {most}"] = made["pixel_values"][0][:count].reshape(-1)[::STRIDE].numpy()
    np.savez_compressed(GOLDEN / "processor.npz", **found)


def _write_media() -> None:
    """Logits of random checkpoints for prompts with pictures and frames."""
    checkpoints = _load_checkpoints()
    found: dict[str, np.ndarray] = {}
    for name, (model, parts) in checkpoints.MEDIA_PROMPTS.items():
        ids, _, kinds = checkpoints.media_prompt(parts)
        patches, positions = map(torch.tensor, checkpoints.pictures(tuple(size for _, size in kinds)))
        with tempfile.TemporaryDirectory() as folder:
            reference = _load(checkpoints.write(Path(folder), model, "publisher"))
        found[name] = _media_logits(reference, ids, [kind for kind, _ in kinds], patches, positions)
    np.savez_compressed(GOLDEN / "media.npz", **found)


def _write_demo_media() -> None:
    """Token ids, and logits at a few positions, of conversations with pictures and videos."""
    checkpoints, reference = _load_checkpoints(), _load(DEMO)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found: dict[str, np.ndarray] = {}
    for name, (question, media) in checkpoints.DEMO_MEDIA.items():
        texts, arrays, kinds = [], [], []
        for one in media:
            frames = one if isinstance(one, list) else [(None, *one)]
            kind = "video" if isinstance(one, list) else "image"
            pictures = [checkpoints.square(colour, background) for _, colour, background in frames]
            made = _patches(pictures, 70)
            written = [
                f"<|image>{f'<|{kind}|>' * int(count)}<image|>" for count in made["num_soft_tokens_per_image"]
            ]
            times = [
                "" if second is None else f"{second // 60:02d}:{second % 60:02d} " for second, *_ in frames
            ]
            texts.append(" ".join(time + each for time, each in zip(times, written, strict=True)))
            kinds += [kind] * len(pictures)
            arrays += pictures
        prompt = "<bos>" + _TURN.format(question.format(*texts, filler=_FILLER * 4))
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        made = _patches(arrays, 70)
        logits = _media_logits(reference, ids, kinds, made["pixel_values"], made["image_position_ids"])
        places = sorted({*range(1, len(ids), max(1, len(ids) // 7)), len(ids) - 1})
        found[f"ids {name}"] = np.array(ids, np.int32)
        found[f"positions {name}"] = np.array(places, np.int32)
        found[f"logits {name}"] = logits[places]
    np.savez_compressed(GOLDEN / "demo_media.npz", **found)


def _patches(pictures: list[np.ndarray], most: int) -> Any:
    processor = Gemma4ImageProcessorPil(max_soft_tokens=most)
    return processor(images=[Image.fromarray(each) for each in pictures], return_tensors="pt")


@torch.no_grad()
def _media_logits(
    model: Any, ids: list[int], kinds: list[str], patches: torch.Tensor, positions: torch.Tensor
) -> np.ndarray:
    """``[tokens, vocabulary]``; ``kinds`` says of each picture whether it is an image or a video's frame."""
    types = [{9: 1, 10: 2}.get(token, 0) for token in ids]
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([types])}
    images = torch.tensor([kind == "image" for kind in kinds])
    if images.any():
        inputs |= {"pixel_values": patches[images].float(), "image_position_ids": positions[images].long()}
    if (~images).any():
        inputs |= {
            "pixel_values_videos": patches[~images].float(),
            "video_position_ids": positions[~images].long(),
        }
        inputs["num_frames_per_video"] = torch.tensor([int((~images).sum())])
    return model(**inputs).logits[0].float().numpy()


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
