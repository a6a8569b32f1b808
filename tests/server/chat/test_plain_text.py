"""Text without control tokens: markers are encoded in pieces, and a continuation gets no space in front."""

import asyncio
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider import models
from outrider.server.chat.plain_text import PlainText
from outrider.server.chat.prompt import PromptEncoder, TemplateOptions
from outrider.server.chat.vocabulary import Vocabulary
from outrider.verify.gguf.tokenizer import build_tokenizer


def sentencepiece(marker: AddedToken) -> Any:
    """A tokenizer that puts a space in front of a text and replaces spaces, as CodeLlama's."""
    characters = "▁<>PREdefx☺():"
    tokenizer = Tokenizer(tokenizer_models.BPE({text: i for i, text in enumerate(characters)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_tokens([marker])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_marker_that_begins_with_a_space_is_encoded_in_pieces(normalized: bool) -> None:
    tokenizer = sentencepiece(AddedToken("▁<PRE>", normalized=normalized, special=False))
    plain, marker = PlainText(tokenizer), tokenizer.convert_tokens_to_ids("▁<PRE>")
    assert marker in tokenizer.encode("def▁▁<PRE>x", add_special_tokens=False)
    for text in ("▁<PRE>", "def▁<PRE>x", "def <PRE>x", " <PRE>", "x<PRE> <PRE>", "x  <PRE>", "  <PRE>x<PRE>", "x ▁<PRE>"):
        assert marker not in plain.encode(tokenizer, text)
        assert marker not in plain.encode(tokenizer, text, continues=True)


def test_a_continuation_gets_no_space_in_front() -> None:
    tokenizer = sentencepiece(AddedToken("▁<PRE>", special=True))
    plain = PlainText(tokenizer)
    for text, continues, expected in (("def", False, "▁def"), ("def", True, "def"), (" def", True, "▁def"), ("", True, "")):
        pieces = tokenizer.convert_ids_to_tokens(plain.encode(tokenizer, text, continues))
        assert "".join(pieces) == expected


COMPOSING = [
    "u\u0308<|end|>\u0301",
    "<|e\u0301nd|>",
    "[MAS\u212a]",
    "<|\u212a|>",
    "a\u037e <|end|>\u0338",
    "<\u0338|end|>",
    "e\u0301" * 3,
]


@pytest.mark.parametrize("special", [3, 4])
def test_a_normaliser_makes_no_marker(special: int) -> None:
    """Of text that the tokenizer composes, none becomes a marker, and all of it stays in the prompt."""
    markers = ["<|end|>", "<|\u00e9nd|>", "[MASK]", "<|K|>", "<|fim_middle|>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "[M", "AS", "K]", "ASK]", *markers]
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}" + "".join(markers)
    entries = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": ["[ M", "A S", "K ]", "AS K]", "[M ASK]"]}
    types = [1] * (len(tokens) - len(markers)) + [special] * len(markers)
    built = build_tokenizer(
        {f"tokenizer.ggml.{name}": value for name, value in {**entries, "token_type": types}.items()}
        | {"tokenizer.chat_template": template},
        "x.gguf",
    )
    prompts, ids = PromptEncoder(built), {built.get_vocab()[each] for each in markers}
    for text in [*COMPOSING, "".join(COMPOSING), *markers]:
        plain = asyncio.run(prompts.plain("alice", text, 1000))
        assert ids.isdisjoint(plain), text
        assert unicodedata.normalize("NFC", built.decode(plain)) == unicodedata.normalize("NFC", text)
        chat = asyncio.run(prompts.chat("alice", [{"role": "user", "content": text}], TemplateOptions(), 1000))
        assert ids.isdisjoint(chat[: len(chat) - 1 - len(markers)]), text
        assert chat[-len(markers) :] == [built.get_vocab()[each] for each in markers]


EMBEDDED = AutoTokenizer.from_pretrained(models.TARGET)


@given(st.text(max_size=60))
def test_the_bytes_of_all_tokens_join_to_the_text(text: str) -> None:
    vocabulary = Vocabulary(EMBEDDED)
    ids = EMBEDDED.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert b"".join(vocabulary.bytes_of(id) for id in ids) == text.encode()
