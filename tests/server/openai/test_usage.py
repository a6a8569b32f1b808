"""Usage counts tokens and steps exactly, in the format of each endpoint."""

from outrider.server.engine.messages import StepReport, TokenEvent
from outrider.server.openai.usage import Usage


def usage() -> Usage:
    made = Usage(prompt_tokens=5, cached_tokens=2)
    made.record_event(TokenEvent("r", [1], "a"))  # without a step
    step = StepReport(0.1, 0.1, 0.1, {"prediction": 4, "trigram": 2}, {"prediction": 3})
    made.record_event(TokenEvent("r", [1, 2, 3, 4], "b", step=step))
    return made


def test_chats_and_completions() -> None:
    body = usage().completion_body(reasoning_tokens=2)
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (5, 5, 10)
    assert body["prompt_tokens_details"]["cached_tokens"] == 2
    details = body["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 1)
    assert details["reasoning_tokens"] == 2


def test_responses() -> None:
    body = usage().response_body(reasoning_tokens=2)
    assert (body["input_tokens"], body["output_tokens"], body["total_tokens"]) == (5, 5, 10)
    assert body["input_tokens_details"]["cached_tokens"] == 2
    assert body["output_tokens_details"] == {"reasoning_tokens": 2}
