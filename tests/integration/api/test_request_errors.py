"""Invalid requests: status codes, OpenAI's error shape, and the official client's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.requests import MESSAGES, body
from tests.servers import Served

BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"temperature": "hot"}, 400, "temperature", "temperature"),
    ({"temperature": 9}, 400, "temperature", "less than or equal to 2"),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"max_tokens": -1}, 400, "max_tokens", "max_tokens"),
    ({"max_tokens": 1 << 70}, 200, None, ""),
    ({"seed": 1 << 63}, 400, "seed", "seed"),
    ({"n": 10_000}, 400, "n", "at most 16"),
    ({"stop": ["x"] * 40}, 400, "stop", "at most 16"),
    ({"stop": ["x" * 900]}, 400, "stop", "at most 500"),
    ({"stop": 3}, 400, "stop", "stop"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [999_999]}, 400, "prompt", "from 0 to"),
    ({"prompt": "x " * 5000}, 400, "prompt", "maximum context length is 2048 tokens"),
    ({"model": "gpt-5"}, 404, "model", "this server serves"),
    ({"speculation": {"drafter": "magic"}}, 400, "speculation.drafter", "drafter"),
    ({"unknown_field": 1}, 200, None, ""),
]


@pytest.mark.parametrize(("fields", "status", "param", "words"), BAD)
def test_errors_have_openais_shape(served: Served, fields: dict[str, Any], status: int, param: str | None, words: str) -> None:
    response = served.http.post("/v1/completions", json=body(served, max_tokens=3) | fields)
    assert response.status_code == status, response.text
    if status != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"] or "").startswith(param or "")
        assert words in error["message"]


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
