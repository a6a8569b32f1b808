"""A job's events: text that matches the tokens, however these split it, ends at the stop string; and counts for the metrics."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.engine.messages import Request, TokenEvent
from outrider.server.settings import load_settings
from outrider.server.worker.detokenizer import AnswerText, Detokenizer
from outrider.server.worker.job import Job, make_detokenizer
from outrider.server.worker.runtime import Runtime
from outrider.server.worker.sessions import SessionStore
from outrider.verify.decode import step
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import ReasoningLimit, SamplingParams
from tests.server.fakes import VOCABULARY
from tests.server.worker.fakes import Letters, tiny_runtime

SETTINGS = load_settings(None, {"speculation.drafter": "lookup", "speculation.max_nodes": 4})
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def runtime(tiny_runner: TorchRunner) -> Runtime:
    return tiny_runtime(tiny_runner, SETTINGS)


def events(runtime: Runtime, params: SamplingParams = GREEDY, **fields: Any) -> list[TokenEvent]:
    session = SessionStore(runtime.runner, 1, 60.0).acquire("", None, np.arange(5, dtype=np.int32))
    assert session is not None
    request = Request(**{"id": "a", "prompt": [1, 2, 3, 1, 2], "params": params, "max_tokens": 12, **fields})
    job = Job(request, session, runtime, SETTINGS)
    found: list[TokenEvent] = []
    while not (found and found[-1].finish):
        event = job.event(step(job.stream))
        if event is not None:
            found.append(event)
    job.stream.close()
    return found


def tokens_of(found: list[TokenEvent]) -> list[int]:
    return [token for event in found for token in event.tokens]


def text_of(found: list[TokenEvent]) -> str:
    return "".join(event.text for event in found)


def test_a_stop_string_cuts_tokens_and_text(runtime: Runtime) -> None:
    full = events(runtime)
    stop = text_of(full)[4:6]
    at = text_of(full).index(stop)
    found = events(runtime, stop=(stop,))
    assert (found[-1].finish, found[-1].stop_string) == ("stop", stop)
    assert all(event.stop_string is None for event in (*found[:-1], *full))
    assert text_of(found) == text_of(full)[:at]
    assert tokens_of(found) == tokens_of(full)[: at + len(stop)]
    with_stop = events(runtime, stop=(stop,), keep_stop=True)
    assert text_of(with_stop) == text_of(full)[: at + len(stop)]


def test_a_stop_token_counts_but_has_no_text(runtime: Runtime) -> None:
    full = tokens_of(events(runtime))
    end = full.index(full[5])  # its first occurrence
    found = events(runtime, params=replace(GREEDY, logprobs=1), stop_token_ids=[full[5]])
    assert tokens_of(found) == full[: end + 1]
    assert found[-1].finish == "stop"
    assert text_of(found) == Letters().text_of(full[:end])


def test_logprobs_of_tokens_and_prompt(runtime: Runtime) -> None:
    found = events(runtime, params=replace(GREEDY, logprobs=2), wants_prompt_logprobs=True, max_tokens=6)
    for event in found:
        assert event.logprobs is not None
        assert len(event.logprobs.chosen) == len(event.tokens)
        assert all(len(ids) == 2 for ids in event.logprobs.ids)
    assert found[0].prompt_logprobs is not None and len(found[0].prompt_logprobs.chosen) == 4
    assert all(event.prompt_logprobs is None for event in found[1:])


def traced_tokens(event: TokenEvent) -> list[int]:
    assert event.step is not None and event.step.trace is not None
    trace = event.step.trace
    assert trace.accepted == sorted(trace.accepted)
    assert [trace.parents[row] for row in trace.accepted] == [-1, *trace.accepted][: len(trace.accepted)]
    sizes = {len(column) for column in (trace.tokens, trace.parents, trace.probability, trace.sources)}
    assert sizes == {sum(event.step.drafted.values())}
    return [trace.tokens[row] for row in trace.accepted] + ([] if trace.bonus is None else [trace.bonus])


def test_the_trace_has_the_tokens_of_its_step(runtime: Runtime) -> None:
    plain = events(runtime)
    fields: dict[str, Any] = {"trace": True, "drafter": "prediction", "prediction": tokens_of(plain)}
    full = events(runtime, **fields)
    stop = text_of(plain)[4:6]
    for found in (full, events(runtime, stop=(stop,), keep_stop=True, **fields), events(runtime, **fields, max_tokens=5)):
        assert [traced_tokens(event) for event in found] == [event.tokens for event in found]
    assert any(event.step.trace.accepted for event in full if event.step and event.step.trace)
    assert all(event.step is not None and event.step.trace is None for event in plain)


def test_without_the_library_only_predictions_are_drafted(runtime: Runtime) -> None:
    expected = tokens_of(events(runtime))
    runtime.has_library = False
    prediction: dict[str, Any] = {"prediction": expected}
    for fields, sources in (({}, set()), (prediction, {"prediction"}), ({**prediction, "drafter": "none"}, set())):
        found = events(runtime, **fields)
        assert tokens_of(found) == expected
        assert {source for event in found if event.step is not None for source in event.step.drafted} == sources


def test_reasoning_is_closed_at_its_limit(runtime: Runtime) -> None:
    free = tokens_of(events(runtime))
    closing = next(token for token in range(64) if token not in free)
    limited = tokens_of(events(runtime, reasoning=ReasoningLimit(5, closing)))
    assert limited[:6] == [*free[:5], closing]
    assert closing not in limited[6:]
    assert tokens_of(events(runtime, reasoning=ReasoningLimit(5, closing, opening=closing))) == free  # it does not reason


def test_only_the_shown_special_tokens_are_text() -> None:
    vocabulary = VOCABULARY
    one, two = sorted(vocabulary.special_ids)[:2]
    request = Request("a", [5], SamplingParams(), 9, shown_tokens=[two])
    assert make_detokenizer(request, vocabulary).feed([one, two]) == vocabulary.text_of(two)
    shown = Request("a", [5], SamplingParams(), 9, skip_special_tokens=False)
    assert make_detokenizer(shown, vocabulary).feed([one, two]) == vocabulary.text_of(one) + vocabulary.text_of(two)


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


def feed_blocks(answer: AnswerText, tokens: Sequence[int], block: int, ends: bool = False) -> tuple[str, int]:
    """Feeds `tokens` in blocks up to a stop string. Returns the text, all of it if it `ends`, and the number of tokens used."""
    text, used = "", 0
    for at in range(0, len(tokens), block):
        part, count = answer.feed(list(tokens[at : at + block]))
        text, used = text + part, used + count
        if answer.stopped:
            return text, used
    return text + (answer.finish() if ends else ""), used


# Tokens of one character, and hidden ones.
TEXTS = ("a", "b", "\n", "é", "<|x|>", "<|yy|>")
SPECIAL = (4, 5)


def of_texts(hidden: tuple[int, ...] = SPECIAL) -> Detokenizer:
    return Detokenizer(lambda token: TEXTS[token].encode(), hidden)


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
    text, used = feed_blocks(answer, tokens, block, ends=True)
    assert (text, used, answer.stop_string) == reference(tokens, stops, min_tokens, keep)


@pytest.mark.parametrize("stop", ["<", "|x", "x|>", "<|x|", "|>a", "a<"])
def test_a_part_of_a_hidden_token_is_no_stop_string(stop: str) -> None:
    answer = AnswerText(of_texts(), [stop])
    assert feed_blocks(answer, [0, 4, 0, 1], 2, ends=True) == ("aab", 4)
    assert answer.stop_string is None
    shown = AnswerText(of_texts(hidden=()), [stop])
    assert feed_blocks(shown, [0, 4, 0, 1], 2, ends=True)[1] < 4 and shown.stop_string == stop


@pytest.mark.parametrize(
    ("stops", "expected", "found"),
    [(["<|x|>"], "ab", "<|x|>"), (["b<|x|>"], "a", "b<|x|>"), (["<|x|>\n"], "ab", None), (["x"], "ab", None), ([], "ab", None)],
)
def test_the_token_that_ends_an_answer_may_complete_a_stop_string(stops: list[str], expected: str, found: str | None) -> None:
    for hidden in (SPECIAL, ()):
        answer = AnswerText(of_texts(hidden), stops)
        text, used = answer.feed([0, 1, 4], ends=True)
        assert (text if answer.stopped else text + answer.finish(), used, answer.stop_string) == (expected, 3, found)
