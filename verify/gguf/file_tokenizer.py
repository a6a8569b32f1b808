"""The tokenizer that a GGUF file describes, built when it first encodes a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Tokenizer, decoders, processors

from outrider.verify.fast_tokenizer import FastTokenizer
from outrider.verify.gguf.vocabulary import Vocabulary, text_ends

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


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
        """See `FastTokenizer`."""
        return {self._vocabulary.ids[token.content]: token for token in self._added}

    def get_vocab(self) -> Mapping[str, int]:
        """See `FastTokenizer`."""
        return self._vocabulary.ids

    @property
    def longest_token(self) -> int:
        """See `FastTokenizer`."""
        return self._vocabulary.tokens.longest

    def _id_of(self, token: str) -> int | None:
        return self._vocabulary.ids.get(token)

    def _token_of(self, id: int) -> str | None:
        tokens = self._vocabulary.tokens
        return tokens[id] if 0 <= id < len(tokens) else None


def post_processor(vocabulary: Vocabulary) -> processors.PostProcessor:
    """Adds the tokens with which texts begin and end."""
    before, after = text_ends(vocabulary)
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
    )
