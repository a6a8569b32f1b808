"""/v1/responses through the official client: the order of events, and what is not stored."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.servers import Served

QUESTION = "Write a function that reads a file."


def test_the_events_of_a_stream(served: Served) -> None:
    fields: Any = {"model": served.model, "input": QUESTION, "max_output_tokens": 40, "temperature": 0}
    full = served.client.responses.create(**fields)
    events: list[Any] = list(served.client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{full.status}",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == full.output_text
    assert events[-1].response.output_text == full.output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    with served.client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == full.output_text


def test_a_response_that_is_not_stored_is_not_continued(served: Served) -> None:
    not_stored = served.client.responses.create(model=served.model, input="x", store=False, max_output_tokens=16)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.create(model=served.model, input="y", previous_response_id=not_stored.id)
