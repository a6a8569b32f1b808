"""Error responses in the format of the API that a path belongs to.

OpenAI's is `{"error": {"message", "type", "param", "code"}}`. The paths of Anthropic's API have Anthropic's:
`{"type": "error", "error": {"type", "message"}, "request_id"}`, and those of Ollama's API have `{"error": message}`.
"""

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from outrider.server.engine.engine import EngineError, InvalidRequest, Overloaded, Unavailable

# Errors without an estimate suggest this delay.
RETRY_AFTER_SECONDS = 1.0
# This is nginx's status for a client that closes its connection before the answer begins. Only logs and metrics have it.
CLIENT_CLOSED_REQUEST = 499
# Both may quote a client's value of any length, so they are cut.
MESSAGE_CHARACTERS, PARAM_CHARACTERS = 600, 120
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
OLLAMA_PREFIX = "/api/"
# Endpoints of llama-server that clients try, and what they can use here.
INSTEAD = {
    "/completion": "/v1/completions",
    "/props": "/v1/models, which has the context's length as meta.n_ctx",
    "/slots": "/metrics",
}
# Responses with these statuses may leave the rest of the body unread, so the connection closes.
BODY_UNREAD = (401, 403, 408, 413, 421, 431)


def shortened(text: str, characters: int) -> str:
    """The text without its middle if it is longer than `characters`."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} ... {text[-half:]}"


class APIError(HTTPException):
    """An error response. `message` is one sentence that says what to do."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_seconds: float | None = None
    ) -> None:
        super().__init__(status, message)
        self.retry_seconds = retry_seconds
        self.message = shortened(message, MESSAGE_CHARACTERS)
        self.param = param and shortened(param, PARAM_CHARACTERS)
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        error_type = ERROR_TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    @property
    def anthropic_status(self) -> int:
        """The status in Anthropic's API, which has 529 for a server that cannot answer now."""
        return 529 if self.status_code == 503 else self.status_code

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        status = self.anthropic_status
        error_type = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": error_type, "message": self.message}, "request_id": request_id}

    def response(self, scope: Scope | None = None) -> JSONResponse:
        """The response to the request of `scope`, in the format of its path; in OpenAI's if there is no scope."""
        headers: dict[str, str] = {}
        if self.status_code in (429, 503):
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_seconds or RETRY_AFTER_SECONDS)))
        elif self.status_code in BODY_UNREAD:
            headers["Connection"] = "close"
        if scope is not None and scope["path"].startswith(OLLAMA_PREFIX):
            return JSONResponse({"error": self.message}, self.status_code, headers)
        if scope is None or scope["path"] not in ANTHROPIC_PATHS:
            return JSONResponse(self.body, self.status_code, headers)
        request_id = scope.get("state", {}).get("request_id")
        return JSONResponse(self.anthropic_body(request_id), self.anthropic_status, headers)


class ClientLeft(APIError):
    """The client has left before its request was complete, so the request is none."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "The client has closed the connection.", code="client_closed_request")


class ContextExceeded(APIError):
    """A prompt that leaves no room for an answer, in the words by which clients of each API know that they must shorten it."""

    def __init__(self, tokens: int, context_tokens: int, field: str, is_estimate: bool = False) -> None:
        """`tokens` is the prompt's length, or an estimate for a prompt that was not encoded."""
        about = "about " if is_estimate else ""
        message = (
            f"This model's maximum context length is {context_tokens} tokens. However, your {field} resulted in {about}"
            f"{tokens} tokens, and an answer needs at least one. Please reduce the length of the {field}."
        )
        super().__init__(400, message, field, "context_length_exceeded")
        self._anthropic_message = f"prompt is too long: {tokens} tokens > {context_tokens - 1} maximum"
        self._anthropic_message += " (an estimate from its beginning)" * is_estimate

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        body = super().anthropic_body(request_id)
        return body | {"error": body["error"] | {"message": self._anthropic_message}}


def schema_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string"}
OPTIONAL = {"anyOf": [TEXT, {"type": "null"}]}
# The bodies of errors.
SCHEMAS = {
    "ErrorBody": schema_of(error=schema_of(message=TEXT, type=TEXT, param=OPTIONAL, code=OPTIONAL)),
    "OllamaErrorBody": schema_of(error=TEXT),
    "AnthropicErrorBody": schema_of(type={"const": "error"}, error=schema_of(type=TEXT, message=TEXT), request_id=OPTIONAL),
}
# The OpenAPI description lists these error responses for every endpoint.
DESCRIPTIONS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Requests from this web page's origin are not allowed.",
    404: "The model, response or path does not exist.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    421: "This host name is not allowed.",
    429: "The server is busy; retry after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The model is unavailable; retry after `Retry-After` seconds.",
}


def described(openapi: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI description with the error responses added to it, in the format of each path."""
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(SCHEMAS)
    for path, operations in openapi["paths"].items():
        is_anthropic = path in ANTHROPIC_PATHS
        api = "Anthropic" if is_anthropic else "Ollama" if path.startswith(OLLAMA_PREFIX) else ""
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{api}ErrorBody"}}}
        texts = DESCRIPTIONS | ({529: DESCRIPTIONS[503]} if is_anthropic else {})
        responses = {str(status): {"description": text, "content": content} for status, text in texts.items()}
        for operation in operations.values():
            operation["responses"] |= responses
            operation["responses"].pop("422", None)  # invalid bodies are answered with 400
    return openapi


def from_engine(error: EngineError) -> APIError:
    """The error response to a request that the engine could not complete."""
    if isinstance(error, Overloaded):
        return APIError(429, str(error), code="queue_full", retry_seconds=error.seconds)
    if isinstance(error, InvalidRequest):
        return APIError(400, str(error), code="invalid_value")
    if isinstance(error, Unavailable):
        return APIError(503, str(error), code=error.code)
    return APIError(500, str(error), code="internal_error")


MEMBERS = ("str", "bool", "int", "float")


def from_validation(error: RequestValidationError) -> APIError:
    """The error response that names the first invalid field of a body and the values it accepts."""
    first = error.errors()[0]
    # Pydantic adds the member of a union ("stop.str"), which is not part of the field's name.
    path = [str(part) for part in first["loc"] if part not in ("body", *MEMBERS) and "[" not in str(part)]
    if first["type"] == "unsupported":
        return APIError(400, f"{first['msg']}.", first["ctx"]["name"], "unsupported_parameter")
    if not path and first["type"] in ("missing", "model_attributes_type", "model_type"):
        return APIError(400, "The body must be a JSON object, with the header Content-Type: application/json.")
    name = ".".join(path) or None
    message = first["msg"].removeprefix("Value error, ")
    return APIError(400, f"Invalid '{name}': {message}." if name else f"Invalid body: {message}.", name, "invalid_value")


def as_api_error(error: APIError | EngineError | RequestValidationError) -> APIError:
    if isinstance(error, APIError):
        return error
    return from_engine(error) if isinstance(error, EngineError) else from_validation(error)


def install(app: FastAPI) -> None:
    """Registers handlers that turn every exception into an error in the format of its path."""

    @app.exception_handler(APIError)
    @app.exception_handler(EngineError)
    @app.exception_handler(RequestValidationError)
    async def expected(request: Request, error: APIError | EngineError | RequestValidationError) -> JSONResponse:
        return as_api_error(error).response(request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        instead = INSTEAD.get(request.url.path)
        messages = {
            404: f"There is no endpoint {request.method} {request.url.path}{f'; use {instead}' if instead else ''}.",
            405: f"{request.url.path} does not support {request.method}.",
        }
        message = messages.get(error.status_code, str(error.detail))
        response = APIError(error.status_code, message).response(request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def internal_error(request: Request, _: Exception) -> JSONResponse:
        message = "The server failed to process this request; see its log for the reason."
        return APIError(500, message, code="internal_error").response(request.scope)
