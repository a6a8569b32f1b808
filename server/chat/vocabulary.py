"""Text and bytes of single tokens.

The bytes of an answer's tokens, joined, are the bytes of its text. The text of a token that is only part of a character
contains replacement characters.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from outrider.verify.fast_tokenizer import AnyTokenizer, FastTokenizer

# SentencePiece writes tokens for single bytes in this form.
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# SentencePiece writes a space as this character.
SPACE = "\u2581"
ANGLE_BRACKETS = re.compile("<.*>", re.DOTALL)
CACHED_TOKENS = 1 << 17


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """The single tokens of a tokenizer."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {int(id): str(token) for id, token in added.items()}
        flagged = {str(token): int(id) for id, token in added.items() if getattr(token, "special", False)}
        named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self.special = flagged | {str(token): int(id) for token, id in named if id is not None}  # special tokens' ids by text
        self.special_ids = frozenset(self.special.values())
        # llguidance matches special tokens by id only, and takes every added token in angle brackets for one.
        self.grammar_tokens = self.special | {text: id for id, text in self._added.items() if ANGLE_BRACKETS.fullmatch(text)}
        joins = tokenizer if isinstance(tokenizer, FastTokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        decoder: Any = None if joins is None else joins.decoder
        self._alphabet = byte_level_alphabet() if "ByteLevel" in str(decoder) else None
        self._is_sentencepiece = SPACE in str(decoder)
        self._keeps_spaces = self._alphabet is not None or (
            self._is_sentencepiece and decoder.decode([f"{SPACE}x"]).startswith(" ")
        )
        self.bytes_of = lru_cache(CACHED_TOKENS)(self._bytes_of)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token that begins a text."""
        return [int(id) for id in self._tokenizer.encode("x", add_special_tokens=False)[:1]]

    @cached_property
    def drops_first_space(self) -> bool:
        """Whether the tokenizer puts a space in front of a text, as SentencePiece may, and leaves one out where it decodes."""
        if self._keeps_spaces:  # found without a text: a tokenizer may be built when it first encodes one
            return False
        first = "".join(map(self.text_of, self._anchor))
        return first.startswith(" ") and not self._tokenizer.decode(self._anchor).startswith(" ")

    def drops_space(self, prompt: Sequence[int], continues: bool) -> bool:
        """Whether the text of an answer lacks the space with which it begins: unless it continues a prompt that has text."""
        return self.drops_first_space and not (continues and any(token not in self.special_ids for token in prompt))

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece: Any = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model may have more tokens than the tokenizer
            return b""
        if isinstance(piece, bytes):  # tokenizers over bytes that are written in Python
            return piece
        if self._alphabet is not None:
            known = all(character in self._alphabet for character in piece)
            return bytes(self._alphabet[character] for character in piece) if known else str(piece).encode()
        if found := BYTE_TOKEN.fullmatch(str(piece)):
            return bytes([int(found[1], 16)])
        if self._is_sentencepiece:
            return str(piece).replace(SPACE, " ").encode()
        before, after = (str(self._tokenizer.decode([*self._anchor, *ids])) for ids in ([], [token]))
        return after.removeprefix(before).encode()
