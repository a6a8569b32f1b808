"""A vocabulary's texts and ids, with the compiled library and without it."""

import struct
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.gguf import texts
from outrider.verify.gguf.texts import LENGTH, Texts, ids_of, read_texts

LISTS = st.lists(st.text(max_size=5) | st.sampled_from(["", "a", "\u2581a", "\0", "é"]), max_size=40)


@pytest.fixture(params=[True, False], ids=["library", "loop"], autouse=True)
def library(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(texts, "LIBRARY", None)
        yield


def stored(given: list[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(each)) + each for each in given)


@given(LISTS)
def test_texts_are_read_and_found(given: list[str]) -> None:
    content = b"before" + stored([text.encode() for text in given]) + b"after"
    found, end = read_texts(content, 6, len(given))
    assert found == given and end == len(content) - 5 and len(found) == len(given)
    assert [found[at] for at in range(-len(given), 0)] == found[:] == given
    assert found.longest == max(map(len, given), default=0)
    ids: Mapping[str, int] = ids_of(found)
    expected = {text: id for id, text in enumerate(given)}
    assert dict(ids) == expected and len(ids) == len(expected)
    assert all(ids[text] == ids.get(text) == id for text, id in expected.items())
    assert "absent text" not in ids and ids.get("absent text", 7) == 7
    with pytest.raises(KeyError):
        ids["absent text"]
    assert Texts.of(given) == found


def test_what_is_no_text_is_replaced() -> None:
    broken = [b"\xff", "é".encode()[:1] + b"x", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"fine"]
    found, _ = read_texts(stored(broken), 0, len(broken))
    assert [*found] == [text.decode("utf-8", "replace") for text in broken]
    assert ids_of(found)["fine"] == 5


@pytest.mark.parametrize("cut", [1, 4, 9, 12])
def test_texts_that_end_too_early_are_refused(cut: int) -> None:
    with pytest.raises((ValueError, struct.error)):
        read_texts(stored([b"abc", b"defg"])[:-cut], 0, 2)


def test_a_length_beyond_the_file_is_refused() -> None:
    with pytest.raises(ValueError, match="it ends within a text"):
        read_texts(LENGTH.pack(1 << 62) + bytes(100), 0, 1)
