"""SentencePiece's BPE of a GGUF file by the compiled library: ready at once, in the memory of the file's texts.

Promises the tokens of the same vocabulary in the library tokenizers, whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.verify.gguf.file_tokenizer import FileTokenizer, Model
from outrider.verify.gguf.native.library import LIBRARY, address
from outrider.verify.gguf.texts import Ids
from outrider.verify.gguf.vocabulary import Vocabulary, text_ends

ADDED, SPECIAL = 1, 2
# A byte may be a token; a space is three bytes, and three more begin each text between added tokens.
MOST_TOKENS = 6


class PieceTokenizer(FileTokenizer):
    """A tokenizer that encodes texts in any thread."""

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
        """See `FastTokenizer`."""
        data = text.encode()
        found = np.empty(MOST_TOKENS * len(data) + MOST_TOKENS, np.int32)
        count = self._library.pieces_encode(
            self._handle, data, len(data), split_special_tokens, self._has_prefix, address(found)
        )
        ids: list[int] = found[:count].tolist()
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        """See `FastTokenizer`."""
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `FastTokenizer`."""
        given = [int(id) for id in ids] if hasattr(ids, "__iter__") else [int(ids)]
        skipped = self._special_texts if skip_special_tokens else ()
        tokens = (self._token_of(id) for id in given)
        return str(self.decoder.decode([token for token in tokens if token is not None and token not in skipped]))
