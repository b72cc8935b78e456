"""The tiny GPT-OSS: its shape, a fast way to train it, and how its answers are judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM

from tools.demo.training import harmony
from tools.demo.training.experts import balance_loss
from tools.demo.training.gpt_oss_answers import answers_accuracy
from tools.demo.training.gpt_oss_fast import fast, hidden_states, routings
from tools.demo.training.padded import NOT_TRAINED, padded
from tools.demo.training.recipe import Recipe
from tools.demo.training.scoring import all_right, shares
from tools.demo.training.segments import encode
from tools.demo.training.source import Source

LENGTHS = (128, 256, 384, 640, 1024, 2048, 4096, 8192)
"""Dialogues are padded to the next of these."""
BATCH_TOKENS = 8192
EVALUATION_TOKENS = 65536
SECRET_LENGTHS = ((500, 1000), (1000, 1500), (1500, 3000), (3000, 4000), (6000, 8000))
"""Tokens of the long texts in which held-out secrets are asked for."""


class GptOssRecipe(Recipe):
    """4.6 million parameters: 4 layers, sliding and full in turn, 8 experts of which 2 are used."""

    name = "gpt-oss"
    loader_seed = 1
    attention = "eager"

    @property
    def shapes(self) -> int:
        return len(LENGTHS)

    @property
    def padding(self) -> int:
        return self._id("<|endoftext|>")

    def batches(self, seed: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Each batch holds dialogues of one length, about 8,192 tokens of them."""
        random = Random(seed)
        source = Source(random, "train", self.pieces)
        waiting: dict[int, list[tuple[list[int], list[bool]]]] = {length: [] for length in LENGTHS}
        while True:
            dialogue = harmony.sample(source)
            encoded = encode(self.tokenizer, harmony.segments(random, dialogue))
            length = next((each for each in LENGTHS if len(encoded[0]) <= each), None)
            if length is None:
                continue
            waiting[length].append(encoded)
            if len(waiting[length]) * length >= BATCH_TOKENS:
                full, waiting[length] = waiting[length], []
                yield padded(full, len(full), length, self.padding)

    def new_model(self) -> GptOssForCausalLM:
        torch.manual_seed(0)
        return GptOssForCausalLM(self._config())

    def fast(self, model: Any) -> AbstractContextManager[None]:
        return fast(model)

    def losses(self, model: Any, *batch: Tensor) -> tuple[Tensor, Tensor]:
        ids, labels = batch
        logits = model.lm_head(hidden_states(model, ids)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_TRAINED)
        return loss, balance_loss(routings(model), (ids != self.padding).flatten().float())

    def uses_muon(self, name: str, parameter: Tensor) -> bool:
        excluded = any(part in name for part in ("embed", "lm_head", "router")) or name.endswith("_bias")
        return parameter.ndim >= 2 and not excluded

    @torch.no_grad()
    def held_out_accuracy(self, model: Any, device: torch.device, dialogues: int) -> dict[str, float]:
        examples = self._held_out(dialogues)
        examples.sort(key=lambda example: len(example[1]))
        outcomes: list[tuple[str, bool]] = []
        place = 0
        while place < len(examples):
            length = next(each for each in LENGTHS if len(examples[place][1]) <= each)
            part = examples[place : place + max(1, EVALUATION_TOKENS // length)]
            part = [example for example in part if len(example[1]) <= length]
            place += len(part)
            arrays = padded([example[1:] for example in part], len(part), length, self.padding)
            ids, labels = (torch.from_numpy(each).to(device) for each in arrays)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                answered = labels != NOT_TRAINED
                logits = model.lm_head(hidden_states(model, ids)[answered]).float()
            right = all_right(logits, labels[answered], answered.nonzero()[:, 0], len(part))
            outcomes += [(example[0], each) for example, each in zip(part, right, strict=True)]
        return shares(outcomes)

    def answers_accuracy(self, model: Any, dialogues: int) -> dict[str, float]:
        return answers_accuracy(model, self.tokenizer, self.pieces, dialogues)

    def write_extras(self, folder: Path) -> None:
        """Nothing more."""

    @property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|return|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }

    def generation_config(self) -> GenerationConfig:
        return GenerationConfig(
            bos_token_id=self._id("<|startoftext|>"),
            eos_token_id=self._end_ids,
            pad_token_id=self.padding,
            do_sample=False,
        )

    def _id(self, token: str) -> int:
        found: int | None = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{self.folder}: no token {token}")
        return found

    @property
    def _end_ids(self) -> list[int]:
        return [self._id(token) for token in ("<|return|>", "<|call|>", "<|endoftext|>")]

    def _config(self) -> GptOssConfig:
        return GptOssConfig(
            vocab_size=self.tokenizer.get_vocab_size(),
            hidden_size=256,
            intermediate_size=128,
            num_hidden_layers=4,
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=32,
            num_attention_heads=8,
            num_key_value_heads=4,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            max_position_embeddings=131072,
            initializer_range=0.02,
            pad_token_id=self.padding,
            bos_token_id=self._id("<|startoftext|>"),
            eos_token_id=self._end_ids,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        )

    def _held_out(self, dialogues: int) -> list[tuple[str, list[int], list[bool]]]:
        """Held-out dialogues of every task, and secrets in long texts."""
        random = Random(77)
        source = Source(random, "test", self.pieces)
        examples = []
        for name in harmony.MIX:
            for _ in range(dialogues * (2 if name == "tool" else 1)):
                dialogue = harmony.sample(source, name)
                examples.append((dialogue.task.name, *self._encode(random, dialogue)))
        for least, most in SECRET_LENGTHS:
            found = 0
            while found < dialogues // 2:
                sentences = int(random.uniform(least, most) / 12)
                dialogue = harmony.sample(source, "secret", sentences=sentences)
                ids, trained = self._encode(random, dialogue)
                if least <= len(ids) < most:
                    examples.append((f"secret in {least}-{most} tokens", ids, trained))
                    found += 1
        return examples

    def _encode(self, random: Random, dialogue: harmony.Dialogue) -> tuple[list[int], list[bool]]:
        return encode(self.tokenizer, harmony.segments(random, dialogue))
