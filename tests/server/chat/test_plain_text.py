"""Text without control tokens: markers are encoded in pieces, and a continuation gets no space in front."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from outrider.server.chat.plain_text import PlainText


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
