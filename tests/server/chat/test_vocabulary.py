"""Bytes of single tokens: joined, they are the text."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from outrider import models
from outrider.server.chat.vocabulary import Vocabulary

EMBEDDED = AutoTokenizer.from_pretrained(models.TARGET)


@given(st.text(max_size=60))
def test_the_bytes_of_all_tokens_join_to_the_text(text: str) -> None:
    vocabulary = Vocabulary(EMBEDDED)
    ids = EMBEDDED.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert b"".join(vocabulary.bytes_of(id) for id in ids) == text.encode()
