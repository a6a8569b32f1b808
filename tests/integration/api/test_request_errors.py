"""Invalid requests: status codes, OpenAI's error shape, and the official client's exceptions."""

from __future__ import annotations

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
    ({"prompt": "x " * 5000}, 400, "prompt", "context holds 2048"),
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


def test_a_prompt_that_is_too_long_names_both_numbers(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d{4} tokens.*2048") as raised:
        served.client.completions.create(model=served.model, prompt="x = 1\n" * 3000)
    assert raised.value.code == "context_length_exceeded"


def test_the_official_client_raises_its_error_classes(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="messages"):
        served.client.chat.completions.create(model=served.model, messages=[])
    with pytest.raises(openai.BadRequestError, match="image_url"):
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        served.client.chat.completions.create(model=served.model, messages=image)


def test_unknown_paths_wrong_methods_and_broken_bodies(served: Served) -> None:
    http = served.http
    assert http.get("/v1/nothing").json()["error"]["message"].startswith("There is no endpoint")
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert "error" in http.get("/v1/completions").json()
    assert http.post("/v1/completions", content=b"{no json", headers={"content-type": "application/json"}).status_code == 400
    assert http.post("/v1/completions", json=[1]).status_code == 400
    large = http.post("/v1/completions", json=body(served, prompt="x" * 300_000))
    assert large.status_code == 413
    assert large.json()["error"]["code"] == "body_too_large"

    def parts() -> Any:
        for _ in range(400):
            yield b"x" * 1000

    assert http.post("/v1/completions", content=parts()).status_code == 413
