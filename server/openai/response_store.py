"""Stored responses: retrieved by id, and continued by later requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from server.http.errors import APIError
from server.openai.conversation import Message


@dataclass(frozen=True)
class StoredResponse:
    """A finished response, and the conversation up to and including it."""

    principal: str
    response: dict[str, Any]
    messages: list[Message]
    session: str  # the id of the conversation's first response


class ResponseStore:
    """In memory, bounded in number and age, oldest evicted first. A principal sees only its own responses."""

    def __init__(self, capacity: int, ttl_seconds: float) -> None:
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._entries: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # by id: expiry (monotonic), response

    def put(self, stored: StoredResponse) -> None:
        now = time.monotonic()
        self._entries[stored.response["id"]] = (now + self._ttl_seconds, stored)
        while len(self._entries) > self._capacity or (self._entries and next(iter(self._entries.values()))[0] < now):
            self._entries.popitem(last=False)

    def get(self, response_id: str, principal: str, param: str = "response_id") -> StoredResponse:
        """Returns the response. Raises APIError, naming `param`, if it does not exist for `principal`."""
        expires, stored = self._entries.get(response_id, (0.0, None))
        if stored is None or stored.principal != principal or expires < time.monotonic():
            raise APIError(404, f"There is no response {response_id!r}; it may have expired.", param, "response_not_found")
        return stored

    def delete(self, response_id: str, principal: str) -> None:
        """Deletes the response. Raises APIError if it does not exist for `principal`."""
        self.get(response_id, principal)
        del self._entries[response_id]
