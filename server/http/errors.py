"""Errors in OpenAI's shape, on every path: `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from server.engine.engine import EngineError, Impossible, Overloaded, Unavailable

RETRY_AFTER_SECONDS = 1.0  # where nothing better is known
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
} | {
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class APIError(HTTPException):
    """An answer that is an error; `message` is one sentence that says what to do."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_seconds: float | None = None
    ) -> None:
        super().__init__(status, message)
        self.retry_seconds = retry_seconds
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers: Mapping[str, str] = {}
        if self.status_code in (429, 503):
            headers = {"Retry-After": str(max(1, math.ceil(self.retry_seconds or RETRY_AFTER_SECONDS)))}
        elif self.status_code == 413:
            headers = {"Connection": "close"}  # nobody reads the rest of such a body
        return JSONResponse(self.body, self.status_code, headers)


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


# What any endpoint may answer, for the API's own description.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": words}
    for status, words in {
        400: "The request is wrong; `param` names the field.",
        401: "The API key is missing or wrong.",
        404: "There is no such model, response or path.",
        405: "The path does not take this method.",
        413: "The body is too large.",
        429: "The server is busy; `Retry-After` says when to come again.",
        500: "The server failed.",
        503: "The model is not there; `Retry-After` says when to come again.",
    }.items()
}


def from_engine(error: EngineError) -> APIError:
    """What a client is told when the engine cannot answer."""
    if isinstance(error, Overloaded):
        code = {"concurrency": "rate_limit_exceeded", "rate": "rate_limit_exceeded"}.get(error.reason, "queue_full")
        return APIError(429, str(error), code=code, retry_seconds=error.seconds)
    if isinstance(error, Impossible):
        return APIError(400, str(error), code="invalid_value")
    if isinstance(error, Unavailable):
        return APIError(503, str(error), code=error.code)
    return APIError(500, str(error), code="internal_error")


def from_validation(error: RequestValidationError) -> APIError:
    """The first thing wrong with a body: which field, and what it takes."""
    first = error.errors()[0]
    # Pydantic names the member of a union, too ("stop.str"); clients know the field alone.
    path = [str(part) for part in first["loc"] if part not in ("body", "str") and "[" not in str(part)]
    if first["type"] == "json_invalid":
        return APIError(400, "The body is not valid JSON.", code="invalid_json")
    name = ".".join(path) or None
    if first["type"] == "unsupported":
        return APIError(400, f"{first['msg']}.", first["ctx"]["name"], "unsupported_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return APIError(400, f"Invalid '{name}': {message}." if name else f"Invalid body: {message}.", name, "invalid_value")


def install(app: FastAPI) -> None:
    """Makes every error of `app` one of OpenAI's shape."""

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(EngineError)
    async def engine_error(_: Request, error: EngineError) -> JSONResponse:
        return from_engine(error).response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error).response()

    @app.exception_handler(UnicodeEncodeError)
    async def no_text(_: Request, __: UnicodeEncodeError) -> JSONResponse:
        message = "The request holds half of a surrogate pair, which is no text; send valid Unicode."
        return APIError(400, message, code="invalid_unicode").response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"There is nothing at {request.method} {request.url.path}.",
            405: f"{request.url.path} does not take {request.method}.",
        }
        response = APIError(error.status_code, messages.get(error.status_code, str(error.detail))).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> JSONResponse:
        return APIError(500, "The server failed on this request; its log says why.", code="internal_error").response()
