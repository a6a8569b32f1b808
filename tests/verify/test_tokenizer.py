"""A draft model must share its target's tokens and merges."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outrider import models
from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.tokenizer import check_pair, first_difference, load_tokenizer
from tests.hub import MODEL, cache_models


def bpe(vocabulary: dict[str, int], *merges: tuple[str, str]) -> AnyTokenizer:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, list(merges))))


LETTERS = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = (("a", "b"), ("b", "c"))


def test_the_embedded_pair_shares_a_tokenizer() -> None:
    check_pair(load_tokenizer(str(models.TARGET)), load_tokenizer(str(models.DRAFT)))


def test_a_revision_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bpe(LETTERS, *MERGES).save_pretrained(tmp_path / "other")
    shutil.copy(models.TARGET / "config.json", tmp_path / "other")
    cache_models(monkeypatch, tmp_path, {"main": models.TARGET, "v1": tmp_path / "other"})
    assert load_tokenizer(MODEL, revision="v1").get_vocab() == LETTERS
    with pytest.raises(ModelError, match=MODEL):
        load_tokenizer(MODEL, revision="v2")


def test_the_first_difference_is_named() -> None:
    target = bpe(LETTERS, *MERGES)
    assert first_difference(target, bpe(LETTERS, *MERGES)) is None
    swapped = {**LETTERS, "ab": 4, "bc": 3}
    with pytest.raises(ModelError, match="token 3 is 'ab' for the target and is 'bc' for the draft; choose"):
        check_pair(target, bpe(swapped, *MERGES))
    with pytest.raises(ModelError, match="token 5 does not exist for the target and is 'd' for the draft"):
        check_pair(target, bpe({**LETTERS, "d": 5}, *MERGES))
    with pytest.raises(ModelError, match="merge 0 is"):
        check_pair(target, bpe(LETTERS, *reversed(MERGES)))
    with pytest.raises(ModelError, match=r"merge 1 is .* and None for the draft"):
        check_pair(target, bpe(LETTERS, MERGES[0]))
