"""A draft model must split texts as its target does; added tokens and padding may differ."""

import numpy as np
import pytest
from tokenizers import AddedToken

from outrider import models
from outrider.verify.draft_model.shared_ids import SharedIds, find_differences
from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.gguf.tokenizer import build_tokenizer
from outrider.verify.tokenizer import load_tokenizer
from tests.tokenizers import LETTERS, MERGES, bpe

UNUSED, NORMAL, CONTROL = 5, 1, 3


def with_added(*tokens: str) -> AnyTokenizer:
    tokenizer = bpe(LETTERS, *MERGES)
    tokenizer.add_tokens([AddedToken(each, special=True) for each in tokens])
    return tokenizer


def of_file(*added: str, padding: int = 0) -> AnyTokenizer:
    """A file's tokenizer, whose converter has padded the vocabulary."""
    names = [*LETTERS, *added, *(f"[PAD{len(LETTERS) + len(added) + i}]" for i in range(padding))]
    types = [NORMAL] * len(LETTERS) + [CONTROL] * len(added) + [UNUSED] * padding
    entries = {"model": "gpt2", "pre": "gpt-2", "tokens": names, "token_type": types, "merges": ["a b", "b c"]}
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in entries.items()}, "file")


def test_the_embedded_pair_shares_all_ids() -> None:
    assert find_differences(load_tokenizer(str(models.TARGET)), load_tokenizer(str(models.DRAFT))) == {}


def test_the_first_difference_is_named() -> None:
    target = bpe(LETTERS, *MERGES)
    assert find_differences(target, bpe(LETTERS, *MERGES)) == {}
    swapped = {**LETTERS, "ab": 4, "bc": 3}
    with pytest.raises(ModelError, match="token 3 is 'ab' for the target and is 'bc' for the draft; choose"):
        find_differences(target, bpe(swapped, *MERGES))
    with pytest.raises(ModelError, match="token 5 does not exist for the target and is 'd' for the draft"):
        find_differences(target, bpe({**LETTERS, "d": 5}, *MERGES))
    with pytest.raises(ModelError, match="merge 0 is"):
        find_differences(target, bpe(LETTERS, *reversed(MERGES)))
    with pytest.raises(ModelError, match=r"merge 1 is .* and None for the draft"):
        find_differences(target, bpe(LETTERS, MERGES[0]))


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (with_added("<x>", "abc"), with_added("<x>"), {6: 3}),  # the target's newer token is read as "ab", its first one
        (with_added("<x>"), with_added("<x>", "<y>"), {6: 0}),  # the target has none with this id
        (with_added("<x>", "<y>"), with_added("<y>", "<x>"), {5: 6, 6: 5}),  # read as the token of the same name
        (with_added("<x>", "<ab>"), with_added("<z>", "<y>"), {5: 0, 6: 3}),  # "<" and "x" are unknown here
        (with_added("<x>"), of_file("<x>", padding=3), {6: 0, 7: 0, 8: 0}),
        (of_file("<x>", "<ab>", padding=1), of_file("<x>", padding=2), {6: 3}),
    ],
)
def test_added_tokens_and_padding_may_differ(target: AnyTokenizer, draft: AnyTokenizer, expected: dict[int, int]) -> None:
    assert find_differences(target, draft) == expected


def test_what_is_read_and_drafted() -> None:
    ids = SharedIds(9, 7, {2: 4, 5: 8, 8: 1})
    assert ids.own.tolist() == [0, 1, 4, 3, 4, 0, 6, 0, 1]  # ids that the draft model has not are read as its first
    drafted = ids.drafted(np.zeros((2, 7), np.float32))
    assert np.isneginf(np.asarray(drafted)).tolist() == [[False, False, True, False, False, True, False]] * 2
    assert SharedIds(5, 7, {}).drafted(np.zeros((1, 7), np.float32)).shape == (1, 5)
