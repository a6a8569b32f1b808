"""Every exception becomes an error in the format of its path, with its status and headers."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from outrider.server.engine.engine import DeadlineExceeded, EngineError, InvalidRequest, Overloaded, WorkerLost
from outrider.server.http.errors import APIError, from_engine, install
from tests.server.fakes import fetch


class Thing(BaseModel):
    stop: str | list[str]


def answer(error: Exception | None = None, method: str = "POST", path: str = "/thing", **options: Any) -> httpx.Response:
    """The response of an application whose only route raises `error`."""
    app = FastAPI()
    install(app)

    @app.post("/thing")
    @app.post("/v1/messages")
    @app.post("/api/chat")
    async def thing(body: Thing) -> None:
        if error is not None:
            raise error

    return fetch(app, method, path, {"stop": "x"}, **options)


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (Overloaded("full", "queue_full", 2.2), 429, "queue_full", "rate_limit_error"),
        (InvalidRequest("no"), 400, "invalid_value", "invalid_request_error"),
        (WorkerLost("lost"), 503, "worker_unavailable", "service_unavailable_error"),
        (DeadlineExceeded("late"), 503, "deadline_exceeded", "service_unavailable_error"),
        (EngineError("odd"), 500, "internal_error", "server_error"),
    ],
)
def test_engine_errors(error: EngineError, status: int, code: str, kind: str) -> None:
    response = answer(error)
    assert response.status_code == status == from_engine(error).status_code
    assert response.json() == {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_messages_do_not_repeat_a_value_of_a_megabyte() -> None:
    message = f"The model {'x' * 1_000_000!r} does not exist; choose another."
    error = answer(APIError(404, message, "y" * 1_000_000)).json()["error"]
    assert error["message"].startswith("The model 'x") and error["message"].endswith("choose another.")
    assert len(error["message"]) < 1000 and len(error["param"]) < 200


def test_other_exceptions_are_a_500_without_details() -> None:
    response = answer(RuntimeError("a secret"))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full", "queue_full", 2.2), 429), (APIError(404, "full"), 404)])
def test_the_paths_of_ollamas_api_have_its_errors(error: Exception, status: int) -> None:
    response = answer(error, path="/api/chat")
    assert (response.status_code, response.json()) == (status, {"error": "full"})
    assert response.headers.get("retry-after") == {429: "3"}.get(status)
    assert answer(path="/api/create").json() == {"error": "There is no endpoint POST /api/create."}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", "queue_full", 2.2), 429, "rate_limit_error"),
        (WorkerLost("lost"), 529, "overloaded_error"),
        (EngineError("odd"), 500, "api_error"),
        (APIError(401, "odd"), 401, "authentication_error"),
        (APIError(404, "odd", "model", "model_not_found"), 404, "not_found_error"),
        (APIError(413, "odd"), 413, "request_too_large"),
        (RuntimeError("a secret"), 500, "api_error"),
    ],
)
def test_the_paths_of_anthropics_api_have_its_errors(error: Exception, status: int, kind: str) -> None:
    response = answer(error, path="/v1/messages")
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert set(response.json()) == {"type", "error", "request_id"} and set(response.json()["error"]) == {"type", "message"}
    assert response.json()["type"] == "error" and "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 529))
