"""What single tokens are as text and as bytes, for log-probabilities.

A token may be a part of a character: its bytes are exact, its text then has replacement characters.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

BYTE = re.compile("<0x([0-9A-F]{2})>")
KEPT = 1 << 17  # tokens remembered


def printable_bytes() -> dict[str, int]:
    """The characters that byte-level BPE (GPT-2) writes for each byte."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """A tokenizer's tokens, one by one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {int(id): str(token) for id, token in added.items()}
        self.special = {str(token): int(id) for id, token in added.items() if getattr(token, "special", False)}  # by text
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = printable_bytes() if backend is not None and "ByteLevel" in str(backend.decoder) else None
        self.bytes_of = lru_cache(KEPT)(self._bytes_of)

    def text_of(self, token: int) -> str:
        """The token alone as text."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._bytes is not None and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if found := BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return piece.replace("\u2581", " ").encode()
