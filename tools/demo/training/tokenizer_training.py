"""Trains the two tokenizers on synthetic text: 1,280 tokens each, in seconds on a CPU.

The checkpoints keep the tokenizers that they were delivered with. A new tokenizer needs a
new checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.demo.training import gemma_format, harmony, words
from tools.demo.training.segments import Segment
from tools.demo.training.source import LETTERS, Source

VOCABULARY = 1280
DIALOGUES = 40_000
_LIST_REPEATS = 60
"""How often every word on the lists is shown, so that common ones become a token or two."""

# As in GPT-OSS's own tokenizer, but digits stand alone.
_HARMONY_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_harmony(file: Path, dialogues: int = DIALOGUES) -> Tokenizer:
    """Byte-level BPE; control tokens come last."""
    random = Random(1)
    source = Source(random, "train", LETTERS)
    corpus = list(_word_lists())
    for _ in range(dialogues):
        dialogue = harmony.sample(source)
        corpus += _ordinary(harmony.segments(random, dialogue), harmony.CONTROL_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_HARMONY_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(harmony.CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(harmony.CONTROL_TOKENS))
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return tokenizer


def train_gemma(file: Path, dialogues: int = DIALOGUES) -> Tokenizer:
    """BPE with byte fallback, spaces as U+2581; control tokens come first."""
    random = Random(1)
    source = Source(random, "train", LETTERS)
    corpus = list(_word_lists())
    for _ in range(dialogues):
        dialogue = gemma_format.sample(source)
        corpus += _ordinary(gemma_format.segments(random, dialogue), gemma_format.CONTROL_TOKENS)
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.Split("\u2581", "merged_with_next"),
            pre_tokenizers.Split(Regex(r"[^\p{L}\u2581\d]"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*gemma_format.CONTROL_TOKENS, *byte_tokens],
        initial_alphabet=[*(chr(code) for code in range(33, 127)), "\u2581", "\n"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    definition = json.loads(tokenizer.to_str())
    # Bytes are ordinary vocabulary, and merges need no help to find words: as in Gemma's own tokenizer.
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] in gemma_format.ID
    ]
    definition["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(definition, ensure_ascii=False), encoding="utf-8")
    return Tokenizer.from_file(str(file))


def _ordinary(segments: Iterable[Segment], control_tokens: Sequence[str]) -> Iterator[str]:
    """The text between control tokens."""
    pattern = re.compile("|".join(map(re.escape, sorted(control_tokens, key=len, reverse=True))))
    for segment in segments:
        yield from filter(None, pattern.split(segment.text))


def _word_lists() -> Iterator[str]:
    listed = [*words.WORDS, *words.HELD_OUT_WORDS[:10], *words.NAMES, *words.CITIES, *words.DAYS]
    listed += [*words.MONTHS, *words.CAPITALS]
    for _ in range(_LIST_REPEATS):
        yield from (f" {word}" for word in listed)
