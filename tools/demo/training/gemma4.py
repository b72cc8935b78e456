"""The tiny Gemma 4 with its eyes: its shape, its batches, and how its answers are judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, GenerationConfig

from tools.demo.training import gemma4_fast as fast_path
from tools.demo.training import gemma_format
from tools.demo.training.experts import balance_loss
from tools.demo.training.export import write_json
from tools.demo.training.gemma4_answers import answers_accuracy
from tools.demo.training.gemma_format import ID
from tools.demo.training.padded import NOT_TRAINED, padded
from tools.demo.training.painting import paint, patch_positions
from tools.demo.training.pictures import CELLS_AT_MOST, NUMBERS, Picture, blank, pack
from tools.demo.training.recipe import Recipe
from tools.demo.training.scoring import all_right, shares
from tools.demo.training.segments import encode
from tools.demo.training.source import Source

PADDING = ID["<eos>"]
"""Never ``<pad>``: its embedding is zero, and normalising that gives gradients that are not numbers."""

EVALUATION_ROWS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a batch: how long its rows are and how many, how many pictures it has and of how many patches."""

    patches: int
    length: int
    rows: int
    pictures: int


SHAPES = (
    Shape(0, 96, 48, 0),
    Shape(0, 192, 28, 0),
    Shape(0, 448, 12, 0),
    Shape(144, 64, 48, 48),
    Shape(144, 128, 28, 112),
    Shape(144, 224, 20, 140),
    Shape(648, 128, 32, 32),
    Shape(648, 192, 22, 44),
    Shape(648, 352, 12, 48),
    Shape(648, 640, 7, 56),
)
SMALL_CELLS = 16
"""Pictures of at most so many cells fit into 144 patches."""


@dataclass(slots=True)
class _Waiting:
    """Dialogues of one shape that do not fill a batch yet."""

    encoded: list[tuple[list[int], list[bool]]] = field(default_factory=list)
    pictures: list[tuple[Picture, ...]] = field(default_factory=list)

    def has_room_for(self, pictures: Sequence[Picture], shape: Shape) -> bool:
        taken = sum(map(len, self.pictures))
        return len(self.encoded) < shape.rows and taken + len(pictures) <= shape.pictures

    def batch(self, shape: Shape) -> tuple[NDArray[Any], ...]:
        """Ids and labels ``[rows, length]``; which feature a soft token takes, of the same shape; pictures ``[N, 34]``.

        And zeros ``[P]``: their number tells how many patches there is room for.
        """
        ids, labels = padded(self.encoded, shape.rows, shape.length, PADDING)
        features = np.zeros_like(ids)
        is_soft = (ids == ID["<|image|>"]) | (ids == ID["<|video|>"])
        room = shape.patches // fast_path.PATCHES_IN_A_CELL
        packed: list[NDArray[np.float32]] = []
        for row, pictures in enumerate(self.pictures):
            if pictures:
                firsts = [(len(packed) + index) * room for index in range(len(pictures))]
                taken = [
                    first + np.arange(picture.soft_tokens)
                    for first, picture in zip(firsts, pictures, strict=True)
                ]
                features[row, is_soft[row]] = np.concatenate(taken)
                packed += [pack(picture) for picture in pictures]
        packed += [blank()] * (shape.pictures - len(packed))
        numbers = np.stack(packed) if packed else np.zeros((0, NUMBERS), np.float32)
        return ids, labels, features, numbers, np.zeros(shape.patches, np.float32)


class Gemma4Recipe(Recipe):
    """5.2 million parameters, 0.4 of them in the vision tower: 5 sliding layers and a full one, 8 experts of which 2 are used."""

    name = "gemma4"
    loader_seed = 2
    attention = "sdpa"

    @property
    def shapes(self) -> int:
        return len(SHAPES)

    def batches(self, seed: int) -> Iterator[tuple[NDArray[Any], ...]]:
        random = Random(seed)
        source = Source(random, "train", self.pieces)
        waiting = {shape: _Waiting() for shape in SHAPES}
        while True:
            dialogue = gemma_format.sample(source)
            encoded = encode(self.tokenizer, gemma_format.segments(random, dialogue))
            shape = _shape_for(len(encoded[0]), dialogue.pictures)
            if shape is None:
                continue
            if not waiting[shape].has_room_for(dialogue.pictures, shape):
                full, waiting[shape] = waiting[shape], _Waiting()
                yield full.batch(shape)
            waiting[shape].encoded.append(encoded)
            waiting[shape].pictures.append(dialogue.pictures)

    def new_model(self) -> Gemma4ForConditionalGeneration:
        """Some constants differ from what they do nothing with, so that an engine that skips them is noticed."""
        torch.manual_seed(0)
        model = Gemma4ForConditionalGeneration(self._config())
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():
            tower = model.model.vision_tower
            # Smaller, and the model learns colours but not places.
            tower.patch_embedder.position_embedding_table.normal_(0, 0.5, generator=random)
            tower.std_bias.copy_(torch.randn(tower.std_bias.shape, generator=random) * 0.2)
            scale = 0.2 + 0.1 * torch.rand(tower.std_scale.shape, generator=random)
            tower.std_scale.copy_(scale.to(torch.bfloat16))
            for layer in model.model.language_model.layers:
                layer.layer_scalar.copy_((0.8 + 0.4 * torch.rand(1, generator=random)).to(torch.bfloat16))
        return model

    def fast(self, model: Any) -> AbstractContextManager[None]:
        return fast_path.fast(model)

    def losses(self, model: Any, *batch: Tensor) -> tuple[Tensor, Tensor]:
        ids, labels, features, pictures, patches = batch
        embeddings = fast_path.embedded(model, ids)
        if len(pictures):
            with torch.no_grad():
                positions = patch_positions(pictures, len(patches))
                pixels = paint(pictures, positions)
            seen = fast_path.features(model, pixels, positions)[features].to(embeddings.dtype)
            embeddings = torch.where(fast_path.is_soft_token(ids)[..., None], seen, embeddings)
        logits = fast_path.logits(model, fast_path.hidden_states(model, ids, embeddings))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_TRAINED)
        is_real = (ids != PADDING).flatten().float()
        return loss, balance_loss(fast_path.routings(model), is_real)

    def uses_muon(self, name: str, parameter: Tensor) -> bool:
        excluded = ("embed_tokens", "lm_head", "router", "position_embedding", "input_proj")
        return parameter.ndim >= 2 and not any(part in name for part in excluded)

    @torch.no_grad()
    def held_out_accuracy(self, model: Any, device: torch.device, dialogues: int) -> dict[str, float]:
        random = Random(78)
        source = Source(random, "test", self.pieces)
        jobs: list[tuple[str, str | None]] = [(name, None) for name in gemma_format.MIX if name != "text"]
        jobs += [("text", name) for name in gemma_format.TEXT_MIX]
        outcomes: list[tuple[str, bool]] = []
        for name, text_name in jobs:
            samples = [gemma_format.sample(source, name, text_name) for _ in range(dialogues)]
            examples = [
                (sample, encode(self.tokenizer, gemma_format.segments(random, sample))) for sample in samples
            ]
            examples.sort(key=lambda example: len(example[1][0]))
            for start in range(0, len(examples), EVALUATION_ROWS):
                part = examples[start : start + EVALUATION_ROWS]
                right = self._all_right(model, device, part)
                outcomes += [(example[0].name, each) for example, each in zip(part, right, strict=True)]
        return shares(outcomes)

    def answers_accuracy(self, model: Any, dialogues: int) -> dict[str, float]:
        return answers_accuracy(model, self.tokenizer, self.pieces, dialogues)

    def write_extras(self, folder: Path) -> None:
        """How pictures and videos are read."""
        pictures = {
            "image_processor_type": "Gemma4ImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": False,
            "do_convert_rgb": True,
            "image_mean": [0.0] * 3,
            "image_std": [1.0] * 3,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "max_soft_tokens": CELLS_AT_MOST,
            "resample": 3,
        }
        videos = {name: value for name, value in pictures.items() if name != "image_processor_type"}
        videos |= {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 8}
        videos |= {"do_sample_frames": True, "do_normalize": True}
        write_json(folder / "preprocessor_config.json", pictures)
        processor = {"processor_class": "Gemma4Processor", "image_seq_length": CELLS_AT_MOST}
        processor |= {"image_processor": pictures, "video_processor": videos}
        write_json(folder / "processor_config.json", processor)

    @property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "model_max_length": 131072,
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "clean_up_tokenization_spaces": False,
        }

    def generation_config(self) -> GenerationConfig:
        return GenerationConfig(
            bos_token_id=ID["<bos>"],
            eos_token_id=[ID["<eos>"], ID["<turn|>"], ID["<|tool_response>"]],
            pad_token_id=ID["<pad>"],
            do_sample=False,
        )

    def _all_right(
        self,
        model: Any,
        device: torch.device,
        examples: Sequence[tuple[gemma_format.Dialogue, tuple[list[int], list[bool]]]],
    ) -> list[bool]:
        encoded = [each for _, each in examples]
        length = max(len(tokens) for tokens, _ in encoded)
        arrays = padded(encoded, len(encoded), length, PADDING)
        ids, labels = (torch.from_numpy(each).to(device) for each in arrays)
        packed = [pack(picture) for dialogue, _ in examples for picture in dialogue.pictures]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            embeddings = fast_path.embedded(model, ids)
            if packed:
                pictures = torch.from_numpy(np.stack(packed)).to(device)
                positions = patch_positions(pictures)
                embeddings = fast_path.filled(model, ids, embeddings, paint(pictures, positions), positions)
            hidden = fast_path.hidden_states(model, ids, embeddings)
            answered = labels != NOT_TRAINED
            logits = fast_path.logits(model, hidden[answered])
        return all_right(logits, labels[answered], answered.nonzero()[:, 0], len(examples))

    def _config(self) -> Gemma4Config:
        vocabulary = self.tokenizer.get_vocab_size()
        text = {
            "vocab_size": vocabulary,
            "vocab_size_per_layer_input": vocabulary,
            "hidden_size": 192,
            "num_hidden_layers": 6,
            "intermediate_size": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": fast_path.WINDOW,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 96,
            "use_double_wide_mlp": False,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
            "final_logit_softcapping": fast_path.SOFTCAP,
            "max_position_embeddings": 131072,
            "pad_token_id": ID["<pad>"],
            "bos_token_id": ID["<bos>"],
            "eos_token_id": ID["<eos>"],
        }
        vision = {
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "global_head_dim": 24,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 256,
            "standardize": True,
        }
        return Gemma4Config(
            text_config=text,
            vision_config=vision,
            audio_config=None,
            image_token_id=ID["<|image|>"],
            video_token_id=ID["<|video|>"],
            audio_token_id=ID["<|audio|>"],
            boi_token_id=ID["<|image>"],
            eoi_token_id=ID["<image|>"],
            boa_token_id=ID["<|audio>"],
            eoa_token_index=ID["<audio|>"],
        )


def _shape_for(length: int, pictures: Sequence[Picture]) -> Shape | None:
    """The smallest shape of batch that a dialogue fits, None if it fits none."""
    patches = 0
    if pictures:
        patches = 144 if max(picture.soft_tokens for picture in pictures) <= SMALL_CELLS else 648
    return next((shape for shape in SHAPES if shape.patches == patches and length <= shape.length), None)
