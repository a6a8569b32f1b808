"""Invalid requests: status codes, OpenAI's error shape, and the official client's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.requests import MESSAGES
from tests.servers import Served


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_a_prompt_that_is_too_long_names_both_numbers(served: Served, endpoint: str) -> None:
    client, long, model = served.client, "x = 1\n" * 3000, served.model
    create: dict[str, Callable[[], Any]] = {
        "chat": lambda: client.chat.completions.create(model=model, messages=[{"role": "user", "content": long}]),
        "completions": lambda: client.completions.create(model=model, prompt=long),
        "responses": lambda: client.responses.create(model=model, input=long, stream=True),
    }
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is 2048 tokens.*resulted in \d{4,5} tokens"
    ) as raised:
        create[endpoint]()
    assert raised.value.code == "context_length_exceeded"


def test_the_official_client_raises_its_error_classes(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="messages"):
        served.client.chat.completions.create(model=served.model, messages=[])
    with pytest.raises(openai.BadRequestError, match="'picture'"):
        unknown: Any = [{"role": "user", "content": [{"type": "picture"}]}]
        served.client.chat.completions.create(model=served.model, messages=unknown)
