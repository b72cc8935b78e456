"""A checkpoint's tokenizer, in the two directions that serving needs: text to ids, an id to bytes.

Always true: no control token comes out of ``encode_text``, whatever the text, and ordinary
text gives the ids that the publisher's tokenizer gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from darkbloom_core.checkpoint._config import present, read_json
from darkbloom_core.errors import CheckpointError, UnsupportedCheckpoint


class TextTokenizer:
    """``tokenizer.json`` and ``tokenizer_config.json`` of the checkpoint folder ``path``. Thread-safe.

    Control tokens are the added tokens that the tokenizer calls special, and those whose
    text is in ``control_names`` (for publishers that leave the mark off tokens which are
    structure all the same). Raises ``CheckpointError`` naming the file if the tokenizer
    is missing or damaged, ``UnsupportedCheckpoint`` if it is of a kind that cannot keep
    the promises above.
    """

    def __init__(self, path: Path, control_names: Iterable[str] = ()) -> None:
        self.file = path / "tokenizer.json"
        definition = read_json(self.file)
        config_file = path / "tokenizer_config.json"
        self.special_tokens = MappingProxyType(
            _named_tokens(read_json(config_file) if present(config_file) else {})
        )
        control_names = frozenset(control_names)
        added = definition.get("added_tokens") or []
        try:
            for token in added:
                token["special"] = bool(token.get("special")) or token["content"] in control_names
            self._tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{self.file}: not a usable tokenizer ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        controls = [token for token in added if token["special"]]
        self._control_ids = {token["content"]: int(token["id"]) for token in controls}
        self.control_ids = frozenset(self._control_ids.values())
        self.strips = {
            token["content"]: (bool(token.get("lstrip")), bool(token.get("rstrip"))) for token in controls
        }
        self._check_controls()
        self._bytes = self._byte_table(definition, added)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows are below this."""
        return len(self._bytes)

    @property
    def control_names(self) -> frozenset[str]:
        """The texts of the control tokens."""
        return frozenset(self._control_ids)

    def control_id(self, name: str) -> int | None:
        """The id of the control token whose text is ``name``, or None if there is none."""
        return self._control_ids.get(name)

    def require_control_id(self, name: str) -> int:
        """As ``control_id``, but raises ``CheckpointError`` if there is none."""
        try:
            return self._control_ids[name]
        except KeyError:
            raise CheckpointError(f"{self.file}: no special token {name}, which this family needs") from None

    def encode_text(self, text: str) -> tuple[int, ...]:
        """``text`` to ids, all of it as ordinary text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that ``token`` stands for; empty for control tokens and unknown ids."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, control tokens left out. For tests and tools; serving goes byte by byte."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def _check_controls(self) -> None:
        """Refuse a tokenizer that makes more of a text than its control tokens and the pieces between them.

        Also one whose ordinary merges reach a control token.
        """
        publisher = {
            name: list(self._tokenizer.encode(name + "a", add_special_tokens=False).ids)
            for name in self._control_ids
        }
        self._tokenizer.encode_special_tokens = True
        letter = list(self.encode_text("a"))
        for name, token in self._control_ids.items():
            if publisher[name] != [token, *letter]:
                raise UnsupportedCheckpoint(
                    f"{self.file}: text after {name} is tokenised unlike text at the start"
                )
            if not self.control_ids.isdisjoint(self.encode_text(name)):
                raise UnsupportedCheckpoint(f"{self.file}: the plain text {name} becomes a control token")

    def _byte_table(self, definition: Mapping[str, Any], added: list[dict[str, Any]]) -> list[bytes]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        literal = {token["content"] for token in added}
        decoder = json.dumps(definition.get("decoder"))
        if '"ByteLevel"' in decoder:
            to_bytes = _byte_level
        elif '"ByteFallback"' in decoder or "\\u2581" in decoder:
            to_bytes = _byte_fallback
        else:
            raise UnsupportedCheckpoint(
                f"{self.file}: neither a byte-level nor a byte-fallback tokenizer, so tokens have no bytes"
            )
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            if token in self.control_ids:
                continue
            table[token] = text.encode() if text in literal else to_bytes(text)
        return table


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, which chat templates may use by name."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as (GPT-2's map).

    Printable Latin-1 stands for itself; every other byte, in order, is a character from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet


_BYTE_OF = _byte_alphabet()
_HEX_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(0x100)}


def _byte_level(text: str) -> bytes:
    if all(character in _BYTE_OF for character in text):
        return bytes(_BYTE_OF[character] for character in text)
    return text.encode()


def _byte_fallback(text: str) -> bytes:
    return _HEX_TOKENS.get(text) or text.replace("\u2581", " ").encode()
