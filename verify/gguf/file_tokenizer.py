"""The tokenizer that a GGUF file describes, built when it first encodes a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, processors

from outrider.verify.fast_tokenizer import FastTokenizer
from outrider.verify.gguf.native.library import LIBRARY, address
from outrider.verify.gguf.texts import Ids
from outrider.verify.gguf.vocabulary import Vocabulary, text_ends

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ADDED, SPECIAL = 1, 2
# A byte may be a token; a space is three bytes, and three more begin each text between added tokens.
MOST_TOKENS = 6


@dataclass(frozen=True)
class Model:
    """How a kind of tokenizer splits, merges and joins."""

    decoder: decoders.Decoder
    build: Callable[[], Tokenizer]


class FileTokenizer(FastTokenizer):
    """The tokenizer that a GGUF file describes.

    What encodes and decodes texts is built when it is first used: with a large vocabulary that takes seconds, and a process
    that only reads an answer's tokens does without it.
    """

    def __init__(self, vocabulary: Vocabulary, model: Model) -> None:
        """`model` makes the tokenizer without its added tokens."""
        self._vocabulary, self._model = vocabulary, model
        self.decoder, self.chat_template = model.decoder, vocabulary.chat_template
        special = {name: vocabulary.token(role) for name, role in ROLES.items()}
        self.special_tokens_map = {name: token for name, token in special.items() if token is not None}
        added = vocabulary.added()
        known = {token.content for token in added}
        missing = dict.fromkeys(token for token in self.special_tokens_map.values() if token not in known)
        self._added = [*added, *(AddedToken(token, special=True) for token in missing)]
        self.named_ends, self.likely_ends = vocabulary.named_ends, vocabulary.likely_ends

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:  # type: ignore[override]
        """The tokenizer that encodes and decodes texts. Raises ModelError."""
        backend = self._model.build()
        backend.add_tokens(self._added)
        backend.post_processor = post_processor(self._vocabulary)
        return backend

    def __len__(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {self._vocabulary.ids[token.content]: token for token in self._added}

    @property
    def unused_tokens(self) -> list[str]:
        """The tokens that no text is split into, such as padding."""
        return self._vocabulary.unused

    def get_vocab(self) -> Mapping[str, int]:
        return self._vocabulary.ids

    @property
    def longest_token(self) -> int:
        return self._vocabulary.tokens.longest

    def _id_of(self, token: str) -> int | None:
        return self._vocabulary.ids.get(token)

    def _token_of(self, id: int) -> str | None:
        tokens = self._vocabulary.tokens
        return tokens[id] if 0 <= id < len(tokens) else None


class PieceTokenizer(FileTokenizer):
    """SentencePiece's BPE by the compiled library: ready at once, in the memory of the file's texts, and in any thread.

    Promises the tokens of the same vocabulary in the library tokenizers, whose merges follow from the scores.
    """

    def __init__(self, vocabulary: Vocabulary, model: Model) -> None:
        """Requires the library, and a vocabulary with scores."""
        super().__init__(vocabulary, model)
        assert LIBRARY is not None and isinstance(vocabulary.ids, Ids)
        self._library, self._handle = LIBRARY, vocabulary.ids.handle
        kinds = np.zeros(len(self), np.uint8)
        for token in self._added:
            kinds[vocabulary.ids[token.content]] = SPECIAL if token.special else ADDED
        unknown = -1 if vocabulary.unknown is None else vocabulary.ids[vocabulary.unknown]
        # The library reads these arrays.
        self._arrays = np.ascontiguousarray(vocabulary.types, np.int32), np.array(vocabulary.get("scores"), np.float32), kinds
        LIBRARY.pieces_complete(self._handle, *[address(array) for array in self._arrays], unknown)
        self._has_prefix = bool(vocabulary.get("add_space_prefix", True))
        before, after = text_ends(vocabulary)
        self._before, self._after = ([vocabulary.ids[token] for token in tokens] for tokens in (before, after))

    def __deepcopy__(self, _: Any) -> PieceTokenizer:
        return self  # it never changes

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: Any) -> list[int]:
        data = text.encode()
        found = np.empty(MOST_TOKENS * len(data) + MOST_TOKENS, np.int32)
        count = self._library.pieces_encode(
            self._handle, data, len(data), split_special_tokens, self._has_prefix, address(found)
        )
        ids: list[int] = found[:count].tolist()
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        given = [int(id) for id in ids] if hasattr(ids, "__iter__") else [int(ids)]
        skipped = self._special_texts if skip_special_tokens else ()
        tokens = (self._token_of(id) for id in given)
        return str(self.decoder.decode([token for token in tokens if token is not None and token not in skipped]))


def post_processor(vocabulary: Vocabulary) -> processors.PostProcessor:
    """Adds the tokens with which texts begin and end."""
    before, after = text_ends(vocabulary)
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
    )
