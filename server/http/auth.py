"""API keys. A key's name is the principal, which owns sessions, datastores and stored responses.

Promises that a request without a valid key is refused before its body is read and names itself nowhere, and that keys are
compared in constant time and appear in no message.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.fair_threads import ANYONE
from outrider.server.http.errors import APIError
from outrider.server.settings import ApiKey

# /metrics has its own rules, see `exposition`.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready", "/version", "/metrics", "/"})
# A browser sends no key with requests for the playground's files, and they contain nothing of the server.
OPEN_PREFIX = "/page/"
# Reading them needs no key; nothing else does.
OPEN_METHODS = ("GET", "HEAD")
# Ids of this form are safe to log and to send back.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Authenticator:
    """ASGI middleware: sets `request.state.principal`, or answers with a 401. Lets requests for open paths pass.

    A client with a valid key may name its request by `x-request-id`.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, ApiKey]) -> None:
        self._app = app
        self._digests = {name: digest(key.key.get_secret_value()) for name, key in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["method"], scope["path"]):
            try:
                headers = Headers(scope=scope)
                principal = self.principal(headers.get("authorization"), headers.get("x-api-key"))
            except APIError as error:
                return await error.response(scope)(scope, receive, send)
            state = scope.setdefault("state", {})
            state["principal"] = principal
            if REQUEST_ID.fullmatch(request_id := headers.get("x-request-id", "")):
                state["request_id"] = request_id
        await self._app(scope, receive, send)

    def principal(self, header: str | None, api_key: str | None = None) -> str:
        """The principal of an Authorization header, or else of an `x-api-key` header. Raises APIError.

        ANYONE if the server has no keys.
        """
        if not self._digests:
            return ANYONE
        sent = key_digest(header, api_key)
        # No early exit: the time must not depend on which key matches.
        matches = [name for name, expected in self._digests.items() if hmac.compare_digest(sent, expected)]
        if not matches:
            raise wrong_key()
        return matches[0]


def is_open(method: str, path: str) -> bool:
    return method in OPEN_METHODS and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


def key_digest(header: str | None, api_key: str | None = None) -> bytes:
    """The digest of the key in an Authorization header, or else in an `x-api-key` header. Raises APIError if there is none."""
    if header is None and api_key:
        return digest(api_key.strip())
    scheme, _, key = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        message = "The API key is missing; send it in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
        raise APIError(401, message, code="missing_api_key")
    return digest(key.strip())


def wrong_key() -> APIError:
    return APIError(401, "The API key is wrong; check the header `Authorization` or `x-api-key`.", code="invalid_api_key")


def digest(key: str) -> bytes:
    """Digests have equal lengths, so comparing them takes the same time for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
