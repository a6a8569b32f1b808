"""Completions: answers and chunks, echoes and `best_of`; usage and traces; log-probabilities, whose tokens have their place."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import StepReport, TokenEvent, TokenLogprobs
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.logprobs import CompletionLogprobs, TextCursor
from outrider.server.openai.usage import Usage
from outrider.server.worker.detokenizer import AnswerText, Detokenizer
from tests.server.fakes import FIRST_TOKEN, TOKENIZER, VOCABULARY, FakeEngine, events, post

PATH = "/v1/completions"


def test_best_of_returns_the_most_likely() -> None:
    engine = FakeEngine("a")
    answer = post(engine, PATH, {"prompt": "x", "best_of": 3, "n": 1}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a!!"]  # the last candidate has the highest log-probability
    assert answer["choices"][0]["logprobs"] is None  # computed, but not requested
    assert len(engine.requests) == 3


def test_the_echo_precedes_the_text_and_has_logprobs() -> None:
    answer = post(FakeEngine("ab"), PATH, {"prompt": ["x = 1", "y"], "echo": True, "logprobs": 1}).json()
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("x = 1ab", "yab")
    found = first["logprobs"]
    assert found["token_logprobs"][:2] == [None, -1.0]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"][-1] == len("x = 1")


def test_offsets_of_an_echo_of_several_bytes_per_character_are_in_the_text() -> None:
    prompt = "a 🧑‍🚀 b 龘 c"
    answer = post(FakeEngine("d"), PATH, {"prompt": prompt, "echo": True, "logprobs": 5}).json()
    [choice] = answer["choices"]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets == sorted(offsets) and offsets[-1] == len(prompt) and len(offsets) == len(tokens)
    whole = {token: offset for token, offset in zip(tokens[:-1], offsets, strict=False) if not token.startswith("bytes:")}
    assert all(prompt.startswith(token, offset) for token, offset in whole.items()) and " b" in whole


def test_streams_of_several_prompts_number_their_choices() -> None:
    engine = FakeEngine("a", "b")
    *chunks, done = events(post(engine, PATH, {"prompt": ["x", "y"], "n": 2, "stream": True}))
    assert done == "[DONE]"
    texts = {index: "" for index in range(4)}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "ab!", 2: "ab", 3: "ab!"}
    assert engine.admitted == [False, True, True, True]  # the later choices belong to an accepted request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"suffix": "z"}, "suffix"),
    ],
)
def test_invalid_completions_are_rejected(fields: dict[str, Any], param: str) -> None:
    response = post(FakeEngine("x"), PATH, {"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_each_step_has_one_trace(path: str, prompt: dict[str, Any]) -> None:
    """Also steps without text, such as the second, and the last."""
    body = prompt | {"stream": True, "n": 2, "session_id": "s"}
    chunks = events(post(FakeEngine("a", "", "b"), path, body | {"speculation": {"trace": True}}))
    for index in (0, 1):
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
        traces = [choice["trace"] for choice in choices if "trace" in choice]
        assert [trace["draft"]["tokens"][trace["accepted"][0]] for trace in traces] == [FIRST_TOKEN + i for i in range(4)]
    plain = events(post(FakeEngine("a"), path, body))
    assert not any("trace" in choice for chunk in plain[:-1] for choice in chunk["choices"])


def usage() -> Usage:
    made = Usage(prompt_tokens=5, cached_tokens=2)
    made.record_event(TokenEvent("r", [1], "a"))  # without a step
    step = StepReport(0.1, 0.1, 0.1, {"prediction": 4, "trigram": 2}, {"prediction": 3})
    made.record_event(TokenEvent("r", [1, 2, 3, 4], "b", step=step))
    return made


def test_usage_is_that_of_all_events() -> None:
    body = usage().completion_body(reasoning_tokens=2)
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (5, 5, 10)
    assert body["prompt_tokens_details"]["cached_tokens"] == 2
    details = body["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 1)
    assert details["reasoning_tokens"] == 2
    body = usage().response_body(reasoning_tokens=2)
    assert (body["input_tokens"], body["output_tokens"], body["total_tokens"]) == (5, 5, 10)
    assert body["input_tokens_details"]["cached_tokens"] == 2
    assert body["output_tokens_details"] == {"reasoning_tokens": 2}


TEXTS = ["plain words", "a 🧑‍🚀 b 龘 c", "👩🏽‍💻👨‍👩‍👧‍👦!", "नमस्ते दुनिया", "สวัสดีชาวโลก", "𠮷野家で𩸽を食べた"]
TEXTS += ["e\u0301 ñ 한국\n\t"]


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
