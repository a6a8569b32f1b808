"""Log-probabilities in both formats: bytes are exact, there is no infinity, and tokens have their place in the text."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import TokenEvent, TokenLogprobs
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.logprobs import CompletionLogprobs, TextCursor
from outrider.server.worker.detokenizer import AnswerText, Detokenizer
from tests.server.fakes import TOKENIZER, VOCABULARY

TEXTS = [
    "plain words",
    "a 🧑‍🚀 b 龘 c",
    "👩🏽‍💻👨‍👩‍👧‍👦!",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "𠮷野家で𩸽を食べた",
    "e\u0301 ñ 한국\n\t",
]


class Pieces:
    """A vocabulary of these pieces, as SentencePiece's; token 0 is special."""

    special_ids = frozenset([0])

    def __init__(self, *pieces: bytes) -> None:
        self.bytes_of = pieces.__getitem__


def outputs(
    vocabulary: Any,
    tokens: Sequence[int],
    size: int,
    stops: Sequence[str] = (),
    hidden: Collection[int] = (),
    drops_space: bool = False,
) -> list[ChoiceOutput]:
    """An answer in steps of `size` tokens, as a worker divides it."""
    answer = AnswerText(Detokenizer(vocabulary.bytes_of, hidden, drops_space), stops)
    made = []
    for start in range(0, len(tokens), size):
        step = tokens[start : start + size]
        text, used = answer.feed(step)
        ends = answer.stopped or start + size >= len(tokens)
        if ends and not answer.stopped:
            text += answer.finish()
        logprobs = TokenLogprobs([-1.0] * used, [[]] * used, [[]] * used)
        made.append(ChoiceOutput(0))
        made[-1].add(TokenEvent("r", list(step[:used]), text, "stop" if ends else None, logprobs=logprobs))
        if ends:
            break
    return made


def joined(scores: CompletionLogprobs, made: Sequence[ChoiceOutput]) -> tuple[str, dict[str, list[Any]]]:
    """The text and the entries of a stream. Entries come with the text in which their tokens begin."""
    text, entries = "", dict[str, list[Any]]()
    for each in made:
        text += each.text
        for key, values in (scores.take(each) or {}).items():
            entries.setdefault(key, []).extend(values)
        assert all(offset <= len(text) for offset in entries.get("text_offset", []))
    return text, entries


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_tokens_offset_is_that_of_the_character_in_which_it_begins(text: str, size: int) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    shown, found = joined(CompletionLogprobs(VOCABULARY), outputs(VOCABULARY, tokens, size))
    pieces = [VOCABULARY.bytes_of(token) for token in tokens]
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    assert shown == text
    assert found["text_offset"] == [len(text.encode()[:start].decode(errors="ignore")) for start in starts]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("stop", ["🚀", "b", " 龘 c", "\u200d", "nowhere"])
def test_offsets_stay_in_a_text_that_a_stop_string_cuts(stop: str, size: int) -> None:
    text = TEXTS[1] * 2
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    made = outputs(VOCABULARY, tokens, size, [stop])
    shown, found = joined(CompletionLogprobs(VOCABULARY), made)
    _, uncut = joined(CompletionLogprobs(VOCABULARY), outputs(VOCABULARY, tokens, size))
    assert shown == text.partition(stop)[0]
    used = sum(len(each.tokens) for each in made)
    assert found["text_offset"] == [min(offset, len(shown)) for offset in uncut["text_offset"][:used]]


def test_hidden_tokens_have_no_width() -> None:
    end = min(VOCABULARY.special_ids)
    tokens = [end, *TOKENIZER.encode("ab 🚀", add_special_tokens=False), end]
    hidden = joined(CompletionLogprobs(VOCABULARY, [end]), outputs(VOCABULARY, tokens, 2, hidden=[end]))
    text, found = hidden
    assert text == "ab 🚀" and found["text_offset"][:2] == [0, 0] and found["text_offset"][-1] == len(text)
    text, found = joined(CompletionLogprobs(VOCABULARY), outputs(VOCABULARY, tokens, 2))
    width = len(VOCABULARY.text_of(end))
    assert found["text_offset"][:2] == [0, width] and found["text_offset"][-1] == len(text) - width


@given(st.lists(st.binary(max_size=3) | st.sampled_from([text.encode()[:3] for text in TEXTS]), max_size=12))
def test_places_in_any_bytes_are_those_of_their_replacement_characters(pieces: list[bytes]) -> None:
    cursor, data = TextCursor(), b""
    for piece in pieces:
        place = cursor.feed(piece)
        if piece:
            assert place == len((data + piece[:1]).decode(errors="replace")) - 1
        data += piece


def test_parts_of_characters_are_written_as_their_bytes() -> None:
    pieces = cast(Vocabulary, Pieces(b"<s>", b" \xf0\x9f", b"\xf0\x9f", b"\xa7", b"A", b"A", b"", b""))
    logprobs = TokenLogprobs([-3.0], [[1, 2, 3, 4, 6, 7]], [[-1.0, -1.5, -2.0, -2.5, -4.0, -5.0]])
    found = CompletionLogprobs(pieces).take(ChoiceOutput(0, tokens=[5], logprobs=logprobs, pieces=[("A", 1)]))
    assert found is not None
    assert found["tokens"] == ["A"]
    assert found["top_logprobs"] == [
        {"bytes: \\xf0\\x9f": -1.0, "bytes:\\xf0\\x9f": -1.5, "bytes:\\xa7": -2.0, "token_id:4": -2.5, "": -4.0}
        | {"token_id:7": -5.0, "A": -3.0}
    ]
