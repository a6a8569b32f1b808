"""Builds the tokenizer that a GGUF file describes, without torch.

Promises the ids of the model's own tokenizer. Two kinds are known, by llama.cpp's names: `gpt2`, BPE over bytes, whose split
of text into words the file names, and `llama`, SentencePiece's BPE, whose merges follow from scores. For the others there is
`outrider.verify.gguf.llama_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import FastTokenizer
from outrider.verify.gguf.ends import CONTROL, NORMAL, ends_by_text
from outrider.verify.gguf.ends import ROLES as END_ROLES

UNKNOWN, USER_DEFINED = 2, 4
TEMPLATE, DEFAULT = "tokenizer.chat_template", "default"
# SentencePiece writes a space as this character.
SPACE = "\u2581"
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

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


class UnknownTokenizer(ModelError):
    """A tokenizer of a kind, or with a split of text, that is not built here."""


class Vocabulary:
    """The entries of a file that are about tokens."""

    def __init__(self, entries: Mapping[str, Any], path: str) -> None:
        self._entries = entries
        self.path = path
        self.kind = self.get("model")
        self.architecture = entries.get("general.architecture")
        self.tokens: list[str] = self.get("tokens", [])
        self.types: list[int] = self.get("token_type", [NORMAL] * len(self.tokens))
        self.ids = {token: id for id, token in enumerate(self.tokens)}

    def get(self, name: str, default: Any = None) -> Any:
        return self._entries.get(f"tokenizer.ggml.{name}", default)

    def ids_of(self, role: str) -> list[int]:
        """The tokens with a role such as `eos`: the one that the file names, or its list, without ids of no token."""
        given = [self.get(f"{role}_token_id"), self.get(f"{role}_token_ids")]
        ids = [id for each in given for id in (each if isinstance(each, list) else [each])]
        return [id for id in ids if isinstance(id, int) and 0 <= id < len(self.tokens)]

    def token(self, role: str) -> str | None:
        """The token with a role such as `eos`; None if the file names none."""
        return next((self.tokens[id] for id in self.ids_of(role)), None)

    @property
    def named_ends(self) -> frozenset[int]:
        """The tokens that the file says end a text, a turn or a message."""
        return frozenset(id for role in END_ROLES for id in self.ids_of(role))

    @property
    def likely_ends(self) -> frozenset[int]:
        """The tokens that end answers by their texts, unless the chat template writes them within an answer."""
        return ends_by_text(self.ids, self.types)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name, of which the first is `default`; None if there is none."""
        main = self._entries.get(TEMPLATE)
        named = {
            key.removeprefix(f"{TEMPLATE}."): each for key, each in self._entries.items() if key.startswith(f"{TEMPLATE}.")
        }
        templates = ({} if main is None else {DEFAULT: main}) | named
        texts = {name: str(text) for name, text in templates.items()}
        return texts if len(texts) > 1 else next(iter(texts.values()), None)

    def merges(self) -> list[tuple[str, str]]:
        """The pairs to merge, first the best: as listed, or else as the tokens' scores imply."""
        listed: list[str] | None = self.get("merges")
        if listed is None:
            return list(self._implied_merges())
        pairs = (merge.partition(" ") for merge in listed)
        return [(left, right) for left, _, right in pairs if {left, right, left + right} <= self.ids.keys()]

    def _implied_merges(self) -> Iterator[tuple[str, str]]:
        scores = self.get("scores")
        known = {token for token, kind in zip(self.tokens, self.types, strict=True) if kind == NORMAL}
        order = np.lexsort((np.arange(len(scores)), -np.array(scores, np.float64)))  # of equal scores, the smaller id is first
        for id in order.tolist():
            token = self.tokens[id]
            if token not in known or self.ids[token] != id:
                continue
            for cut in range(1, len(token)):  # a vocabulary has millions of cuts, so this loop is a plain one
                if (left := token[:cut]) in known and (right := token[cut:]) in known:
                    yield left, right

    def added(self) -> list[AddedToken]:
        """The tokens that are found in text before it is split: control tokens, which are special, and the user's."""
        kinds = {CONTROL: True, USER_DEFINED: False}
        typed = zip(self.tokens, self.types, strict=True)
        return [AddedToken(token, normalized=False, special=kinds[kind]) for token, kind in typed if kind in kinds]


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

    def get_vocab(self) -> dict[str, int]:
        """See `FastTokenizer`."""
        return self._vocabulary.ids

    def _id_of(self, token: str) -> int | None:
        return self._vocabulary.ids.get(token)

    def _token_of(self, id: int) -> str | None:
        tokens = self._vocabulary.tokens
        return tokens[id] if 0 <= id < len(tokens) else None


@dataclass(frozen=True)
class Model:
    """How a kind of tokenizer splits, merges and joins."""

    decoder: decoders.Decoder
    build: Callable[[], Tokenizer]


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
        tokenizer = Tokenizer(BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=whole_words))
        words = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*words, in_bytes]), decoder
        if name in COMPOSED or (name == DEFAULT and vocabulary.architecture in COMPOSED_ARCHITECTURES):
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    return Model(decoder, build)


def sentencepiece(vocabulary: Vocabulary) -> Model:
    """SentencePiece's BPE over whole texts; characters without a token become bytes."""
    typed = zip(vocabulary.tokens, vocabulary.types, strict=True)
    unknown = vocabulary.token("unknown") or next((token for token, kind in typed if kind == UNKNOWN), None)
    has_prefix = vocabulary.get("add_space_prefix", True)
    pieces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*pieces, *([decoders.Strip(" ", left=1)] if has_prefix else [])])

    def build() -> Tokenizer:
        model = BPE(vocabulary.ids, vocabulary.merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer, spaces = Tokenizer(model), normalizers.Replace(" ", SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
        tokenizer.decoder = decoder
        return tokenizer

    return Model(decoder, build)


def post_processor(vocabulary: Vocabulary) -> processors.PostProcessor:
    """Adds the tokens with which the file says that texts begin and end."""
    is_sentencepiece = vocabulary.kind == "llama"
    ends = {"bos": vocabulary.get("add_bos_token", is_sentencepiece), "eos": vocabulary.get("add_eos_token", False)}
    tokens = {role: vocabulary.token(role) for role, wanted in ends.items() if wanted}
    before, after = ([token] if (token := tokens.get(role)) else [] for role in ("bos", "eos"))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
    )
