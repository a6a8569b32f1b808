"""The store is bounded in number and age, and a principal sees only its own responses."""

from __future__ import annotations

import pytest

from server.http.errors import APIError
from server.openai.conversation import Message
from server.openai.response_store import ResponseStore, StoredResponse


def stored(response_id: str, principal: str = "alice") -> StoredResponse:
    return StoredResponse(principal, {"id": response_id}, [Message(role="user", content="x")], session=response_id)


def test_the_oldest_responses_are_evicted() -> None:
    store = ResponseStore(capacity=2, ttl_seconds=60)
    for response_id in "abc":
        store.put(stored(response_id))
    assert store.get("c", "alice").messages[0].content == "x"
    assert store.get("b", "alice").session == "b"
    with pytest.raises(APIError):
        store.get("a", "alice")


def test_a_principal_sees_and_deletes_only_its_own() -> None:
    store = ResponseStore(capacity=2, ttl_seconds=60)
    store.put(stored("a"))
    for attempt in (store.get, store.delete):
        with pytest.raises(APIError) as raised:
            attempt("a", "bob")
        assert (raised.value.status_code, raised.value.param) == (404, "response_id")
    store.delete("a", "alice")
    with pytest.raises(APIError) as raised:
        store.get("a", "alice", "previous_response_id")
    assert raised.value.param == "previous_response_id"


def test_expired_responses_are_gone() -> None:
    store = ResponseStore(capacity=2, ttl_seconds=0)
    store.put(stored("a"))
    with pytest.raises(APIError):
        store.get("a", "alice")
    store.put(stored("b"))  # removes the expired one, and does not fail when nothing is left
