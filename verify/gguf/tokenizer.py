"""Builds the tokenizer that a GGUF file describes, without torch.

Promises the ids of the model's own tokenizer. Two kinds are known, by llama.cpp's names: `gpt2`, BPE over bytes, whose split
of text into words the file names, and `llama`, SentencePiece's BPE, whose merges follow from scores. For the others there is
`outrider.verify.gguf.llama_tokenizer`.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from outrider.verify.errors import ModelError
from outrider.verify.gguf.file_tokenizer import FileTokenizer, Model, PieceTokenizer
from outrider.verify.gguf.native.library import LIBRARY
from outrider.verify.gguf.vocabulary import DEFAULT, Vocabulary

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


class UnknownTokenizer(ModelError):
    """A tokenizer of a kind, or with a split of text, that is not built here."""


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
