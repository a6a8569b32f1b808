"""Stored responses: retrieved by id, and continued by later requests. Their routes need no model."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from outrider.server.http.errors import APIError
from outrider.server.openai.conversation import Message
from outrider.server.settings.tree import RESPONSES_BYTES

MESSAGES = TypeAdapter(list[Message])
# Each key stores at most this many responses; the oldest is evicted first.
CAPACITY = 1000
# Responses expire after this time.
TTL_SECONDS = 3600.0
# Each key's responses take at most this much, as JSON.
KEY_BYTES = 64 << 20


class StoredResponse:
    """A finished response, and the conversation up to and including it.

    Kept as JSON, which takes a fraction of the objects' memory, has a known size, and is what a client gets.
    """

    def __init__(self, principal: str, response: dict[str, Any], messages: Sequence[Message], session: str) -> None:
        """`session` is the id of the conversation's first response."""
        self.id: str = response["id"]
        self.principal = principal
        self.session = session
        self.content = msgspec.json.encode(response)
        self._messages = MESSAGES.dump_json(list(messages), exclude_none=True)
        self.items: dict[str, bytes] = {item["id"]: msgspec.json.encode(item) for item in response.get("output", ())}
        self.size_bytes = len(self.content) + len(self._messages) + sum(map(len, self.items.values()))

    @property
    def messages(self) -> list[Message]:
        """The conversation. Decoding it takes time by its size."""
        return MESSAGES.validate_json(self._messages)


@dataclass
class Shelf:
    entries: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)  # expiry and response by id
    responses: dict[str, str] = field(default_factory=dict)  # id of the response, by the id of an output item
    size_bytes: int = 0

    def add(self, expires: float, stored: StoredResponse) -> None:
        self.entries[stored.id] = (expires, stored)
        self.responses |= dict.fromkeys(stored.items, stored.id)
        self.size_bytes += stored.size_bytes

    def remove(self, response_id: str) -> None:
        _, stored = self.entries.pop(response_id)
        for item_id in stored.items:
            del self.responses[item_id]
        self.size_bytes -= stored.size_bytes

    def trim(self, capacity: int, budget_bytes: int) -> None:
        """Removes expired responses, then the oldest until the rest is within the bounds."""
        while self.entries:
            oldest, (expires, _) = next(iter(self.entries.items()))
            if expires >= time.monotonic() and len(self.entries) <= capacity and self.size_bytes <= budget_bytes:
                return
            self.remove(oldest)


class ResponseStore:
    """Responses in memory, bounded in age and, for each principal, in number and bytes. The oldest are evicted first.

    A principal sees only its own responses, and evicts only its own.
    """

    def __init__(self, capacity: int, ttl_seconds: float, budget_bytes: int) -> None:
        """`capacity` and `budget_bytes` apply to each principal."""
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._budget_bytes = budget_bytes
        self._shelves: dict[str, Shelf] = {}  # shelves by principal

    def put(self, stored: StoredResponse) -> None:
        """Stores the response, unless it exceeds its principal's whole budget."""
        if stored.size_bytes <= self._budget_bytes:
            self._shelves.setdefault(stored.principal, Shelf()).add(time.monotonic() + self._ttl_seconds, stored)
        for shelf in self._shelves.values():
            shelf.trim(self._capacity, self._budget_bytes)

    def get(self, response_id: str, principal: str, param: str = "response_id") -> StoredResponse:
        """Returns the response. Raises APIError, naming `param`, if it does not exist for `principal`."""
        shelf = self._shelves.get(principal, Shelf())
        expires, stored = shelf.entries.get(response_id, (0.0, None))
        if stored is None or expires < time.monotonic():
            message = f"There is no response {response_id!r}; it may have expired or been evicted."
            raise APIError(404, message, param, "response_not_found")
        return stored

    def items(self, item_ids: Sequence[str], principal: str) -> dict[str, bytes]:
        """Output items of stored responses in JSON, by id. Raises APIError if one does not exist for `principal`."""
        found: dict[str, bytes] = {}
        responses = self._shelves.get(principal, Shelf()).responses
        for item_id in item_ids:
            if item_id not in responses:
                message = f"There is no item {item_id!r}; its response was not stored, or has expired or been evicted."
                raise APIError(404, message, "input", "item_not_found")
            found[item_id] = self.get(responses[item_id], principal, "input").items[item_id]
        return found

    def delete(self, response_id: str, principal: str) -> None:
        """Deletes the response. Raises APIError if it does not exist for `principal`."""
        self.get(response_id, principal)
        self._shelves[principal].remove(response_id)


def new_store(keys: int) -> ResponseStore:
    """The store of a server with this many keys, which have equal shares."""
    return ResponseStore(CAPACITY, TTL_SECONDS, min(KEY_BYTES, RESPONSES_BYTES // max(1, keys)))


def new_router(store: ResponseStore) -> APIRouter:
    """/v1/responses/{identity}."""
    router = APIRouter(prefix="/v1/responses/{identity}")

    @router.get("")
    async def response(http: Request, identity: str) -> Response:
        return Response(store.get(identity, http.state.principal).content, media_type="application/json")

    @router.delete("")
    async def forget(http: Request, identity: str) -> dict[str, Any]:
        store.delete(identity, http.state.principal)
        return {"id": identity, "object": "response", "deleted": True}

    @router.post("/cancel")
    async def cancel(http: Request, identity: str) -> dict[str, Any]:
        store.get(identity, http.state.principal)  # it is finished, and there are no background responses
        message = "Only background responses can be cancelled; to cancel any other, close its connection."
        raise APIError(400, message, "response_id")

    return router
