"""API keys. A key's name is the principal, which owns sessions, datastores and stored responses.

Promises that keys are compared in constant time and appear in no message.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping

from fastapi import Request

from server.http.errors import APIError
from server.settings import ApiKey

ANYONE = "anyone"  # the principal of a server without keys


class Authenticator:
    """FastAPI dependency of every guarded route: identifies the principal, or raises a 401."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._digests = {name: _digest(key.key.get_secret_value()) for name, key in keys.items()}

    async def __call__(self, http: Request) -> None:
        """Sets `request.state.principal`. Raises APIError."""
        http.state.principal = self.principal(http.headers.get("authorization"))

    def principal(self, header: str | None) -> str:
        """The principal of an Authorization header; ANYONE if the server has no keys. Raises APIError."""
        if not self._digests:
            return ANYONE
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "The API key is missing; send it in the header `Authorization: Bearer KEY`."
            raise APIError(401, message, code="missing_api_key")
        digest = _digest(key.strip())
        # No early exit: the time must not depend on which key matches.
        matches = [name for name, expected in self._digests.items() if hmac.compare_digest(digest, expected)]
        if not matches:
            raise APIError(401, "The API key is wrong; check the `Authorization` header.", code="invalid_api_key")
        return matches[0]


def _digest(key: str) -> bytes:
    """Digests have equal lengths, so comparing them takes the same time for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Whether the address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
