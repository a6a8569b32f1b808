"""One runner for all endpoints: outputs, usage, metrics, keep-alives, padding, coalescing, errors; choices do not mix."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import Request as HTTPRequest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.sequence import Finish
from outrider.server.chat.reasoning_parser import ReasoningParser
from outrider.server.chat.tools import Part, merge_parts, tool_parser
from outrider.server.engine.engine import EngineError, Overloaded
from outrider.server.engine.messages import Accepted, Request, TokenEvent
from outrider.server.http.errors import APIError
from outrider.server.http.json_route import INLINE_BYTES, BodyPool
from outrider.server.http.sse import COALESCED_PADDED_BYTES, PADDED_BYTES, ServerSentEvent
from outrider.server.openai.generation import ChoiceOutput, Cut, GenerationRunner, GenerationTask
from outrider.server.openai.output_parser import HiddenMarkers, OutputParser, SingleCallParser, SingleCallStop
from outrider.server.openai.usage import Usage
from outrider.server.telemetry.metrics import Metrics
from outrider.verify.sampling_params import SamplingParams
from tests.server.fakes import FakeEngine


class TextFormatter:
    """A minimal `Formatter`."""

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
        return {"texts": [output.text for output in outputs], "tokens": usage.completion_tokens}

    def start(self) -> list[ServerSentEvent]:
        return [ServerSentEvent({"start": True})]

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        return [ServerSentEvent({"text": output.text}, padded=True)]

    def heartbeat(self) -> ServerSentEvent | None:
        return ServerSentEvent({"text": ""}, padded=True)

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        return [ServerSentEvent({"tokens": usage.completion_tokens})]

    def error(self, error: APIError) -> list[ServerSentEvent]:
        return [ServerSentEvent({"status": error.status_code, "message": error.message})]


def task(prompts: int = 1, choices: int = 1, **options: Any) -> GenerationTask:
    texts = [[1, 2, 3] for _ in range(prompts)]
    requests = [Request(f"r{number}", text, SamplingParams(), 10) for number, text in enumerate(texts) for _ in range(choices)]
    return GenerationTask(requests, TextFormatter(), time.monotonic(), choices, **options)


def body_of(engine: FakeEngine, generation: GenerationTask, metrics: Metrics | None = None) -> dict[str, Any]:
    response = asyncio.run(GenerationRunner(engine, metrics or Metrics()).respond(http(), generation, stream=False))
    found: dict[str, Any] = json.loads(bytes(response.body))
    return found


def http(bodies: BodyPool | None = None) -> HTTPRequest:
    app = SimpleNamespace(state=SimpleNamespace(bodies=bodies))
    return HTTPRequest({"type": "http", "headers": [], "state": {"principal": "alice"}, "app": app})


def streamed(engine: FakeEngine, generation: GenerationTask, tick_seconds: float = 0.0) -> list[bytes]:
    async def run() -> list[bytes]:
        return [chunk async for chunk in GenerationRunner(engine, Metrics(), tick_seconds).stream(generation)]

    return asyncio.run(run())


def test_a_large_body_is_written_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Watched(TextFormatter):
        def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
            threads.append(threading.current_thread())
            return super().body(outputs, usage)

    async def respond(text: str) -> bytes:
        answer = replace(task(), formatter=Watched())
        return bytes((await GenerationRunner(FakeEngine(text), Metrics()).respond(http(bodies), answer, stream=False)).body)

    bodies = BodyPool({})
    for text in ("a", "a" * (1 + INLINE_BYTES)):
        assert json.loads(asyncio.run(respond(text)))["texts"] == [text]
    bodies.close()
    assert threads[0] is threading.main_thread() and threads[1].name.startswith("outrider-bodies")


class StopAtB:
    """A `Stop` before the first "b"."""

    def feed(self, text: str) -> Cut | None:
        return Cut(text.index("b"), "length") if "b" in text else None


def test_a_stop_ends_each_choice_within_a_text() -> None:
    """What follows is not read: the engine's error is never reached."""
    failing = FakeEngine("a", None, "xb", "c", error=EngineError("odd"))
    assert body_of(failing, task(prompts=2, new_stop=StopAtB)) == {"texts": ["ax", "ax"], "tokens": 4}
    chunks = streamed(failing, task(new_stop=StopAtB))
    found = [json.loads(chunk[6:]) for chunk in chunks if chunk.startswith(b"data")]
    assert found == [{"start": True}, {"text": "a"}, {"text": "x"}, {"tokens": 2}]
    assert body_of(FakeEngine("a", "c"), task(new_stop=StopAtB)) == {"texts": ["ac"], "tokens": 3}


def test_an_error_before_the_first_byte_is_raised_and_a_later_one_is_an_event() -> None:
    full = Overloaded("full", "queue_full", 1.0)
    with pytest.raises(Overloaded):
        streamed(FakeEngine(error=full), task())
    with pytest.raises(Overloaded):
        body_of(FakeEngine("a", error=full), task())
    complete = AsyncMock()
    chunks = streamed(FakeEngine("a", error=full), task(on_complete=complete))
    assert json.loads(chunks[-1][6:]) == {"status": 429, "message": "full"}
    for accepted in (None, Accepted("r")):  # the status is sent after a keep-alive interval, or once the turn begins
        late = streamed(FakeEngine(accepted, error=EngineError("odd")), task())
        assert [json.loads(chunk[6:]) for chunk in late] == [{"start": True}, {"status": 500, "message": "odd"}]
    complete.assert_not_awaited()


def test_the_head_is_sent_when_the_turn_begins() -> None:
    """With the formatter's events, or with a keep-alive if it has none; for the first of several choices only."""
    for tick_seconds in (0.0, 0.01):
        chunks = streamed(FakeEngine(Accepted("r"), "a"), task(choices=2), tick_seconds)
        assert chunks[0] == b'data: {"start":true}\n\n' and sum(b"start" in chunk for chunk in chunks) == 1

    class Plain(TextFormatter):
        def start(self) -> list[ServerSentEvent]:
            return []

    assert streamed(FakeEngine(Accepted("r"), "a"), replace(task(), formatter=Plain()))[0] == b": keep-alive\n\n"


def test_a_stream_that_holds_text_back_is_kept_alive() -> None:
    """While events arrive and nothing is written, as during a tool call, after each interval; in each tick if coalesced."""

    class Held(TextFormatter):
        def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
            return super().deltas(output) if output.text == "e" else []

    def found(keep_alive_seconds: float, tick_seconds: float = 0.0, padded: bool = False) -> list[bytes]:
        async def run() -> list[bytes]:
            runner = GenerationRunner(FakeEngine(*"abcde"), Metrics(), tick_seconds, keep_alive_seconds)
            return [chunk async for chunk in runner.stream(replace(task(padded=padded), formatter=Held()))]

        return asyncio.run(run())

    assert found(60.0).count(b": keep-alive\n\n") == 0
    assert found(0.0).count(b": keep-alive\n\n") == 4  # the last event's text is empty, too, and ends the stream
    assert {len(chunk) - len(b"data: \n\n") for chunk in found(60.0, 0.001, padded=True)[1:-1]} == {COALESCED_PADDED_BYTES}


def test_padding_hides_the_sizes_of_content_and_of_heartbeats() -> None:
    plain = streamed(FakeEngine("a", None, "longer text"), task())
    assert plain[2] == b": keep-alive\n\n"
    padded = streamed(FakeEngine("a", None, "longer text"), task(padded=True))
    sizes = [len(chunk) - len(b"data: \n\n") for chunk in padded[1:-1]]
    assert sizes == [PADDED_BYTES] * 4
    before_content = streamed(FakeEngine(Accepted("r"), None, "a"), task(padded=True))
    assert before_content[1] == b": keep-alive\n\n"


def test_usage_metrics_and_timings_are_recorded_once() -> None:
    metrics, generation = Metrics(), task(prompts=2)
    body_of(FakeEngine("a", "b"), generation, metrics)
    text = metrics.render().decode()
    assert "outrider_prompt_tokens_total 6.0" in text
    assert "outrider_cached_prompt_tokens_total 4.0" in text
    assert "outrider_generated_tokens_total 6.0" in text
    assert "outrider_time_to_first_token_seconds_count 1.0" in text
    assert "outrider_inter_token_latency_seconds_count 5.0" in text
    assert "outrider_request_duration_seconds_count 1.0" in text
    assert generation.stats["completion_tokens"] == 6 and generation.stats["steps"] == 6
    assert generation.stats["first_token_ms"] >= 0


# Text, a call, more text, a second call and the end of the text.
CALLS = "".join(
    f'{text}\n<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>\n'
    for number, text in enumerate(("So:", "And:"))
)


def hermes() -> ReasoningParser:
    return ReasoningParser(tool_parser("hermes"), may_reason=True)


def output(text: str, finish: Finish | None = None, index: int = 0, tokens: int = 1, **fields: Any) -> ChoiceOutput:
    """The output of one event; `fields` are the event's."""
    made = ChoiceOutput(index)
    made.add(TokenEvent("r", [40] * tokens, text, finish, **fields))
    return made


def test_choices_do_not_mix() -> None:
    parser = OutputParser(lambda: ReasoningParser(may_reason=True))
    assert parser.parse(output("<think>a", tokens=3)) == [Part("reasoning", "a")]
    assert parser.parse(output("b", index=1)) == [Part("content", "b")]
    assert parser.parse(output("c", tokens=2)) == [Part("reasoning", "c")]
    assert parser.parse(output("</think>d")) == [Part("content", "d")]
    assert parser.reasoning_tokens == 5


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_an_answer_with_one_call_ends_before_the_second(size: int) -> None:
    parser, stop = (
        SingleCallParser(ReasoningParser(tool_parser("hermes"))),
        SingleCallStop(ReasoningParser(tool_parser("hermes"))),
    )
    parts: list[Part] = []
    read = 0
    for start in range(0, len(CALLS), size):
        piece = CALLS[start : start + size]
        parts += parser.feed(piece)
        read += len(piece)
        cut = stop.feed(piece)
        if cut is not None:
            break
    assert cut is not None and (cut.characters, cut.finish) == (len(piece), "stop")
    assert CALLS[:read].count('"name": "f"') == 2
    assert parser.feed(CALLS) == [] and parser.finish() == []
    expected = [Part("content", "So:"), Part("call", "f"), Part("arguments", '{"a": 0}'), Part("content", "And:")]
    assert merge_parts(parts) == expected


@given(st.lists(st.sampled_from(["<mark>", "<|mark|>", "a", " ", "<ma", "b>", "<tool_call>"]), max_size=8))
def test_markers_are_not_text(pieces: list[str]) -> None:
    markers = ("<mark>", "<|mark|>", "<tool_call>")
    parser = HiddenMarkers(tool_parser("hermes", {}), markers)
    parts = merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    assert "".join(part.text for part in parts) == "".join(piece for piece in pieces if piece not in markers)
