"""The envelope of chats and completions: one id, usage on request, and the end of streams."""

from __future__ import annotations

from typing import Any

from outrider.server.http.errors import APIError
from outrider.server.http.sse import DONE
from outrider.server.openai.choices import ChoicesFormatter
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.schema import CompletionBody
from outrider.server.openai.usage import Usage
from tests.server.fakes import VOCABULARY


class PlainFormatter(ChoicesFormatter):
    id_prefix, body_object, chunk_object = "x-", "body", "chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return {"opens": index}

    def choice_deltas(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        return [self.choice(output)]

    def choice(self, output: ChoiceOutput) -> dict[str, Any]:
        return {"text": output.text, **self._extensions(output)}


def formatter(**fields: Any) -> PlainFormatter:
    return PlainFormatter(CompletionBody.model_validate({"model": "m", "prompt": "x", **fields}), VOCABULARY)


def test_the_body_has_choices_and_usage() -> None:
    made = formatter(return_token_ids=True)
    body = made.body([ChoiceOutput(0, pieces=[("ab", 1)], tokens=[1, 2, 3], echoed_tokens=1)], Usage(completion_tokens=3))
    assert body["id"].startswith("x-") and (body["object"], body["model"]) == ("body", "m")
    assert body["choices"] == [{"text": "ab", "token_ids": [2, 3]}]
    assert body["usage"]["completion_tokens"] == 3
    assert "speculation" not in body
    assert "speculation" in formatter(speculation={"report": True}).body([], Usage())


def data(event: Any) -> dict[str, Any]:
    assert isinstance(event.data, dict)
    return event.data


def test_each_choice_is_opened_once() -> None:
    made = formatter()
    events = [*made.start(), *made.deltas(ChoiceOutput(0, pieces=[("a", 1)])), *made.deltas(ChoiceOutput(0, pieces=[("b", 1)]))]
    events += made.deltas(ChoiceOutput(1, pieces=[("c", 1)]))
    choices = [data(event)["choices"] for event in events]
    assert choices == [[{"opens": 0}], [{"text": "a"}], [{"text": "b"}], [{"opens": 1}], [{"text": "c"}]]
    assert [event.padded for event in events] == [False, True, True, False, True]
    assert len({data(event)["id"] for event in events}) == 1


def test_the_last_chunk_has_usage_and_report_if_requested() -> None:
    assert formatter().end(Usage()) == [DONE]
    with_usage = formatter(stream_options={"include_usage": True})
    last, done = with_usage.end(Usage(completion_tokens=3))
    assert done == DONE
    assert (data(last)["choices"], data(last)["usage"]["completion_tokens"]) == ([], 3)
    assert data(with_usage.deltas(ChoiceOutput(0, pieces=[("a", 1)]))[0])["usage"] is None
    report, _ = formatter(speculation={"report": True}).end(Usage())
    assert "usage" not in data(report) and data(report)["speculation"]["steps"] == 0


def test_heartbeats_are_empty_chunks_and_errors_end_the_stream() -> None:
    assert data(formatter().heartbeat())["choices"] == [] and formatter().heartbeat().padded
    (event,) = formatter().error(APIError(503, "Lost.", code="worker_unavailable"))
    assert data(event)["error"]["code"] == "worker_unavailable"


def test_the_answers_id_is_the_engine_requests() -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x"})
    answer = PlainFormatter(body, VOCABULARY, "0123abcd-0").body([ChoiceOutput(0)], Usage())
    assert answer["id"] == "x-0123abcd"
