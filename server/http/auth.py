"""Who asks: API keys by name. A key's name is the principal that sessions and datastores belong to.

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
    """FastAPI dependency of every /v1 route: finds out the principal, or answers 401."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._names = {name: _digest(key.key.get_secret_value()) for name, key in keys.items()}

    async def __call__(self, http: Request) -> None:
        """Sets `request.state.principal`. Raises APIError."""
        http.state.principal = self.principal(http.headers.get("authorization"))

    def principal(self, header: str | None) -> str:
        """Whose key an Authorization header holds; ANYONE where the server has no keys. Raises APIError."""
        if not self._names:
            return ANYONE
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "No API key given; send it in the header `Authorization: Bearer KEY`."
            raise APIError(401, message, code="missing_api_key")
        given = _digest(key.strip())
        found = [name for name, expected in self._names.items() if hmac.compare_digest(given, expected)]  # always all of them
        if not found:
            raise APIError(401, "The API key is wrong.", code="invalid_api_key")
        return found[0]


def _digest(key: str) -> bytes:
    """Equal lengths for all keys, so that a comparison takes the same time for each."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Nobody outside this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
