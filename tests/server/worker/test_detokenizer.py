"""Text is complete, however tokens split it, and ends exactly at the stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.worker.detokenizer import AnswerText, Detokenizer


def of_bytes(hidden: tuple[int, ...] = (), drops_first_space: bool = False) -> Detokenizer:
    """A detokenizer whose tokens are bytes: the worst case for UTF-8."""
    return Detokenizer(lambda token: bytes([token]), hidden, drops_first_space)


@given(
    st.lists(st.sampled_from([0, 0x20, 0x41, 0x80, 0x9F, 0xE4, 0xBD, 0xA0, 0xF0, 0xFF]), max_size=40),
    st.integers(1, 7),
    st.lists(st.sampled_from(["A", " ", "\ufffdA", "\u4f60"]), max_size=2),
)
def test_text_does_not_depend_on_steps(tokens: list[int], block: int, stops: list[str]) -> None:
    data = bytes(tokens)
    answer = AnswerText(of_bytes(hidden=(0,)), [])
    assert feed_blocks(answer, data, block)[0] + answer.finish() == data.replace(b"\0", b"").decode(errors="replace")
    one, many = (AnswerText(of_bytes(hidden=(0,)), stops) for _ in range(2))
    assert feed_blocks(many, data, block) == feed_blocks(one, data, 1)
    assert many.stop_string == one.stop_string


def test_only_the_first_space_is_dropped() -> None:
    detokenizer = of_bytes(hidden=(0,), drops_first_space=True)
    assert "".join(detokenizer.feed([byte]) for byte in b"\0  a b") == " a b"


def feed_blocks(answer: AnswerText, data: bytes, block: int) -> tuple[str, int]:
    """Feeds `data` in blocks up to a stop string. Returns the text and the number of tokens used."""
    text, used = "", 0
    for at in range(0, len(data), block):
        part, count = answer.feed(list(data[at : at + block]))
        text, used = text + part, used + count
        if answer.stopped:
            break
    return text, used


# Tokens of one character, and hidden ones.
TEXTS = ("a", "b", "\n", "é", "<|x|>", "<|yy|>")
SPECIAL = (4, 5)


def of_texts(hidden: tuple[int, ...] = SPECIAL) -> Detokenizer:
    return Detokenizer(lambda token: TEXTS[token].encode(), hidden)


def feed_steps(answer: AnswerText, tokens: list[int], block: int) -> tuple[str, int]:
    """As `feed_blocks`, and with the held-back text at the end."""
    text, used = "", 0
    for at in range(0, len(tokens), block):
        part, count = answer.feed(tokens[at : at + block])
        text, used = text + part, used + count
        if answer.stopped:
            return text, used
    return text + answer.finish(), used


def reference(tokens: list[int], stops: list[str], min_tokens: int, keep: bool) -> tuple[str, int, str | None]:
    """The text, the number of its tokens and the stop string: the first token completes one, with hidden text or without."""
    exempt = "".join(TEXTS[token] for token in tokens[:min_tokens] if token not in SPECIAL)
    searched = tokens[min_tokens:]
    for used in range(1, len(searched) + 1):
        found = []
        for hidden in ((), SPECIAL):
            kept = [(at, token) for at, token in enumerate(searched[:used]) if token not in hidden]
            for first in range(len(kept)):
                for last in range(first, len(kept)):
                    text = "".join(TEXTS[token] for _, token in kept[first : last + 1])
                    found += [(kept[first][0], len(stop), stop) for stop in stops if stop == text]
        if found:
            start, _, stop = min(found)
            before = "".join(TEXTS[token] for token in searched[:start] if token not in SPECIAL)
            return exempt + before + stop * keep, len(tokens[:min_tokens]) + used, stop
    return "".join(TEXTS[token] for token in tokens if token not in SPECIAL), len(tokens), None


@given(
    st.lists(st.integers(0, 5), max_size=14),
    st.lists(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4).map("".join), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_stop_string_ends_the_text_where_its_tokens_are_hidden(
    tokens: list[int], stops: list[str], block: int, min_tokens: int, keep: bool
) -> None:
    answer = AnswerText(of_texts(), stops, keep, min_tokens)
    text, used = feed_steps(answer, tokens, block)
    assert (text, used, answer.stop_string) == reference(tokens, stops, min_tokens, keep)


@pytest.mark.parametrize("stop", ["<", "|x", "x|>", "<|x|", "|>a", "a<"])
def test_a_part_of_a_hidden_token_is_no_stop_string(stop: str) -> None:
    answer = AnswerText(of_texts(), [stop])
    assert feed_steps(answer, [0, 4, 0, 1], 2) == ("aab", 4)
    assert answer.stop_string is None
    shown = AnswerText(of_texts(hidden=()), [stop])
    assert feed_steps(shown, [0, 4, 0, 1], 2)[1] < 4 and shown.stop_string == stop


@pytest.mark.parametrize(
    ("stops", "expected", "found"),
    [(["<|x|>"], "ab", "<|x|>"), (["b<|x|>"], "a", "b<|x|>"), (["<|x|>\n"], "ab", None), (["x"], "ab", None), ([], "ab", None)],
)
def test_the_token_that_ends_an_answer_may_complete_a_stop_string(stops: list[str], expected: str, found: str | None) -> None:
    for hidden in (SPECIAL, ()):
        answer = AnswerText(of_texts(hidden), stops)
        text, used = answer.feed([0, 1, 4], ends=True)
        assert (text if answer.stopped else text + answer.finish(), used, answer.stop_string) == (expected, 3, found)
