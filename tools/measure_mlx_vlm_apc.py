"""mlx-vlm's prefix cache (APC) in the rounds of ``darkbloom bench prefix``: cold, repeated, next turn.

Runs in an environment of its own, and imports nothing of darkbloom:

    uv venv /tmp/mlx-vlm && uv pip install --python /tmp/mlx-vlm 'mlx-vlm==0.7.10' 'mlx[cpu]==0.32.4'
    LD_PRELOAD=libopenblas.so.0 /tmp/mlx-vlm/bin/python tools/measure_mlx_vlm_apc.py FOLDER --prompt-tokens 2048

Computes in float32, the only type of its experts on a CPU. Weights that mlx-vlm does not find
under the names that it expects stay random, so times can be compared and answers cannot.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm import load
from mlx_vlm.apc import APCManager
from mlx_vlm.generate import stream_generate

ANSWER_TOKENS = 8
NEW_TOKENS = 64
CASES = ("cold", "repeated", "next turn")


def load_folder(folder: Path) -> tuple[Any, Any]:
    """The model and its processor; heads that differ by layer are told in the words that mlx-vlm reads."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    with tempfile.TemporaryDirectory() as temporary:
        copied = Path(temporary, "checkpoint")
        shutil.copytree(folder, copied)
        for heads in text.pop("per_layer_config", {}).values():
            text["global_head_dim"] = heads["head_dim"]
            text["num_global_key_value_heads"] = heads["num_key_value_heads"]
        (copied / "config.json").write_text(json.dumps(config))
        model, processor = load(str(copied), strict=False)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, processor


class Prompts:
    """One prompt after the other, over one cache."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model, processor
        self._cache = APCManager()

    def ask(self, prompt: Sequence[int]) -> tuple[float, int, list[int]]:
        """Seconds to the first token, tokens that were restored, the answer."""
        before = self._cache.stats.restored_tokens
        began, first, answer = time.perf_counter(), None, []
        for result in stream_generate(
            self._model,
            self._processor,
            "",
            input_ids=mx.array([list(prompt)]),
            max_tokens=ANSWER_TOKENS,
            temperature=0.0,
            apc_manager=self._cache,
        ):
            first = first or time.perf_counter()
            answer.append(int(result.token))
        assert first is not None
        return first - began, self._cache.stats.restored_tokens - before, answer[:ANSWER_TOKENS]


def main() -> None:
    """Measure one checkpoint at one length, a new prompt in each round; the first round is not counted."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--prompt-tokens", type=int, required=True)
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    prompts = Prompts(*load_folder(given.folder))
    chance = random.Random(given.prompt_tokens)

    def noise(tokens: int) -> list[int]:
        return [chance.randrange(20, 1280) for _ in range(tokens)]

    found: dict[str, list[tuple[float, int]]] = {case: [] for case in CASES}
    for repeat in range(given.repeats + 1):
        prompt = noise(given.prompt_tokens)
        cold, repeated = prompts.ask(prompt), prompts.ask(prompt)
        following = prompts.ask([*prompt, *repeated[2], *noise(NEW_TOKENS)])
        if repeat:
            for case, (seconds, cached, _) in zip(CASES, (cold, repeated, following), strict=True):
                found[case].append((seconds, cached))
    cold_seconds = statistics.median(seconds for seconds, _ in found["cold"])
    for case in CASES:
        seconds = statistics.median(each for each, _ in found[case])
        cached = min(each for _, each in found[case])
        print(
            f"{given.folder.name}, {given.prompt_tokens} tokens, {case}: {seconds * 1000:.0f} ms, "
            f"{cached} tokens cached, {cold_seconds / seconds:.1f} times as fast as cold",
            flush=True,
        )


if __name__ == "__main__":
    main()
