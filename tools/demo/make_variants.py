"""Writes variants of the demo GPT-OSS checkpoint in the quantised layouts that users have.

``python tools/demo/make_variants.py FOLDER`` writes ``FOLDER/published`` (the publisher's:
MXFP4 experts as blocks and scales, the rest in bfloat16) and ``FOLDER/community`` (the MLX
community's: MXFP4 experts, the rest in 8 bits). Tests make them when they need them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

DEMO = Path(__file__).parents[2] / "plugins/demo/darkbloom_demo/checkpoints/gpt-oss"

Tensors = dict[str, mx.array]


def write_published(folder: Path, source: Path = DEMO) -> Path:
    """As the publisher ships GPT-OSS."""
    config = _config_of_4_57(source)
    config["experts_per_token"] = config["num_experts_per_tok"]
    config["initial_context_length"] = config["rope_scaling"]["original_max_position_embeddings"]
    config["quantization_config"] = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    return _write(folder, source, config, _published)


def write_community(folder: Path, source: Path = DEMO) -> Path:
    """As ``mlx_lm.convert`` writes GPT-OSS with MXFP4 experts and 8 bits for the rest."""
    eight = {"group_size": 64, "bits": 8}
    matrices = [name.removesuffix(".weight") for name, array in _tensors(source).items() if array.ndim == 2]
    rest = {path: eight for path in matrices if ".experts." not in path}
    config = _config_of_4_57(source)
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4", **rest}
    config["quantization_config"] = config["quantization"]
    return _write(folder, source, config, lambda tensors: _community(tensors, set(rest)))


def _config_of_4_57(source: Path) -> dict[str, Any]:
    """The demo's config as it was written before rope parameters had a place of their own."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config["rope_scaling"] = config.pop("rope_parameters")
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    return config


def _write(
    folder: Path,
    source: Path,
    config: dict[str, Any],
    convert: Callable[[Tensors], Iterator[tuple[str, mx.array]]],
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(convert(_tensors(source))))
    return folder


def _tensors(source: Path) -> Tensors:
    tensors = mx.load(str(source / "model.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


def _published(tensors: Tensors) -> Iterator[tuple[str, mx.array]]:
    for name, array in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield name, array
            continue
        words, scales = _mxfp4(array.swapaxes(-1, -2))
        yield f"{name}_blocks", mx.unflatten(words.view(mx.uint8), -1, (-1, 16))
        yield f"{name}_scales", scales


def _community(tensors: Tensors, eight_bits: set[str]) -> Iterator[tuple[str, mx.array]]:
    for name, array in tensors.items():
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts"):
            yield from _packed(name, array, experts in eight_bits)
            continue
        matrix = not part.endswith("_bias")
        rows = array.swapaxes(-1, -2) if matrix else array
        halves = {"down_proj": rows}
        if part.startswith("gate_up_proj"):
            halves = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
        for path, values in halves.items():
            if not matrix:
                yield f"{experts}.{path}.bias", values
                continue
            words, scales = _mxfp4(values)
            yield f"{experts}.{path}.weight", words
            yield f"{experts}.{path}.scales", scales


def _mxfp4(matrices: mx.array) -> tuple[mx.array, mx.array]:
    """Words of eight codes, and exponents; this mode has no biases, whatever MLX's stub says."""
    found = mx.quantize(matrices, group_size=32, bits=4, mode="mxfp4")
    return found[0], found[1]


def _packed(name: str, array: mx.array, quantised: bool) -> Iterator[tuple[str, mx.array]]:
    if not quantised or not name.endswith(".weight"):
        yield name, array
        return
    path = name.removesuffix(".weight")
    for part, values in zip(
        ("weight", "scales", "biases"), mx.quantize(array, group_size=64, bits=8), strict=True
    ):
        yield f"{path}.{part}", values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the variants")
    folder: Path = parser.parse_args().folder
    write_published(folder / "published")
    write_community(folder / "community")


if __name__ == "__main__":
    main()
