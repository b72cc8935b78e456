"""Write a checkpoint of random weights in the MLX community's layout, to measure loading at true sizes.

    python tools/random_checkpoint.py CONFIG.json TOKENIZER_FOLDER FOLDER

The weights are those that the family's ``load_random`` makes, so the checkpoint has the
config's quantisation. ``TOKENIZER_FOLDER`` lends its tokenizer files; its ids need not fit.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from darkbloom_core.contracts import Placement
from darkbloom_core.plugins import load_plugins
from darkbloom_core.slots import current_device

SHARD_BYTES = 4 << 30


def main() -> None:
    config_path, tokenizer, folder = (Path(word) for word in sys.argv[1:4])
    config = json.loads(config_path.read_text())
    device = current_device()
    family = load_plugins().family_for(config)
    model = family.load_random(family.describe(config, device), Placement(device))
    arrays = dict(tree_flatten(model.mlx_lm_model().parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    if "quantization_config" in config:  # mlx-lm's names go with mlx-lm's word for it
        config["quantization"] = {
            "group_size": 32,
            "bits": 4,
            "mode": config.pop("quantization_config")["quant_method"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    for file in (*tokenizer.glob("tokenizer*.json"), *tokenizer.glob("*.jinja")):
        shutil.copy(file, folder)
    shards = list(_shards(arrays))
    index = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(folder / name), shard)
        index |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for array in arrays.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    print(f"{folder}: {total} bytes in {len(shards)} files")


def _shards(arrays: dict[str, mx.array]) -> Iterator[dict[str, mx.array]]:
    shard: dict[str, mx.array] = {}
    for name, array in arrays.items():
        shard[name] = array
        if sum(one.nbytes for one in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


if __name__ == "__main__":
    main()
