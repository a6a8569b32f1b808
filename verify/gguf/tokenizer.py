"""Builds the tokenizer that a GGUF file describes, without torch.

Promises the ids of the model's own tokenizer. Two kinds are known, by llama.cpp's names: `gpt2`, BPE over bytes, whose split
of text into words the file names, and `llama`, SentencePiece's BPE, whose merges follow from scores. For the others there is
`outrider.verify.gguf.llama_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import FastTokenizer
from outrider.verify.gguf.native.library import LIBRARY, address
from outrider.verify.gguf.texts import Ids
from outrider.verify.gguf.vocabulary import DEFAULT, Vocabulary, text_ends

# SentencePiece writes a space as this character.
SPACE = "\u2581"

# Text is first split into words, which merges do not leave. These patterns come from the tokenizer.json of each family.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = r"[^\r\n\p{L}\p{N}]?"
SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{CASED}{UPPER}*{LOWER}+|{CASED}{UPPER}+{LOWER}*|\p{{N}}|{SLASHED_REST}"
GPT4O = rf"{CASED}{UPPER}*{LOWER}+{CONTRACTION}?|{CASED}{UPPER}+{LOWER}*{CONTRACTION}?|\p{{N}}{{1,3}}|{SLASHED_REST}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Families by their splits, which are applied one after the other; in those of the second table, a word that is a token is
# never merged from parts.
SPLITS: dict[tuple[str, ...], str] = {
    (GPT2,): "default gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat mellum a.x-4.0",
    (r"\p{N}", GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (LLAMA3,): "dbrx smaug-bpe chatglm-bpe glm4",
    (QWEN2,): "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2 grok-2 solar-open",
    (QWEN35,): "qwen35",
    (GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
    DEEPSEEK3: "deepseek-v3 hunyuan-dense",
}
WHOLE_WORD_SPLITS: dict[tuple[str, ...], str] = {
    (LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    (TEKKEN,): "tekken",
}
# These families normalise text to composed characters. The others do not, or share a name with some that do not.
COMPOSED = frozenset(["qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "stablelm2", "command-r", "mpt", "olmo"])
COMPOSED_ARCHITECTURES = frozenset(["gptneox"])  # older files of these do not name their split
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ADDED, SPECIAL = 1, 2
# A byte may be a token; a space is three bytes, and three more begin each text between added tokens.
MOST_TOKENS = 6


class UnknownTokenizer(ModelError):
    """A tokenizer of a kind, or with a split of text, that is not built here."""


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


def build_tokenizer(entries: Mapping[str, Any], path: str) -> FileTokenizer:
    """The tokenizer of the GGUF file at `path` with these entries. Raises ModelError, or UnknownTokenizer."""
    vocabulary = Vocabulary(entries, path)
    models = {"gpt2": byte_level, "llama": sentencepiece}
    if vocabulary.kind not in models or not vocabulary.tokens:
        raise UnknownTokenizer(
            f"The tokenizer of {path!r} is of the kind {vocabulary.kind!r}, which is read with llama.cpp; install it with pip"
            " install llama-cpp-python, or serve the model's folder in transformers' format."
        )
    model = models[vocabulary.kind](vocabulary)
    if vocabulary.get("merges") is None and vocabulary.get("scores") is None:
        raise ModelError(f"The tokenizer of {path!r} has neither merges nor scores; serve another file of the model.")
    if vocabulary.kind == "llama" and vocabulary.get("merges") is None and LIBRARY is not None:
        return PieceTokenizer(vocabulary, model)
    return FileTokenizer(vocabulary, model)


def byte_level(vocabulary: Vocabulary) -> Model:
    """BPE over the bytes of words. Raises UnknownTokenizer for an unknown split into words."""
    name, decoder = vocabulary.get("pre", DEFAULT), decoders.ByteLevel()
    found = [
        (splits, table is WHOLE_WORD_SPLITS)
        for table in (SPLITS, WHOLE_WORD_SPLITS)
        for splits, families in table.items()
        if name in families.split()
    ]
    if not found:
        raise UnknownTokenizer(
            f"How the tokenizer of {vocabulary.path!r} splits text, {name!r}, is known to llama.cpp alone; install it with pip"
            " install llama-cpp-python, or serve the model's folder in transformers' format."
        )
    splits, whole_words = found[0]

    def build() -> Tokenizer:
        tokenizer = Tokenizer(BPE(*vocabulary.ids_and_merges(), ignore_merges=whole_words))
        words = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*words, in_bytes]), decoder
        if name in COMPOSED or (name == DEFAULT and vocabulary.architecture in COMPOSED_ARCHITECTURES):
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    return Model(decoder, build)


def sentencepiece(vocabulary: Vocabulary) -> Model:
    """SentencePiece's BPE over whole texts; characters without a token become bytes."""
    has_prefix = vocabulary.get("add_space_prefix", True)
    pieces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*pieces, *([decoders.Strip(" ", left=1)] if has_prefix else [])])

    def build() -> Tokenizer:
        model = BPE(*vocabulary.ids_and_merges(), unk_token=vocabulary.unknown, fuse_unk=True, byte_fallback=True)
        tokenizer, spaces = Tokenizer(model), normalizers.Replace(" ", SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
        tokenizer.decoder = decoder
        return tokenizer

    return Model(decoder, build)
