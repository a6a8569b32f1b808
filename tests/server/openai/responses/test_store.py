"""The store is bounded in number, bytes and age for each principal, and a principal sees only its own responses."""

import threading
from typing import Any

import pytest

from outrider.server.http import json_route
from outrider.server.http.errors import APIError
from outrider.server.openai.conversation import Message
from outrider.server.openai.responses import store
from outrider.server.openai.responses.store import ResponseStore, StoredResponse
from tests.server.fakes import FakeEngine, app_with, fetch

BUDGET_BYTES = 10_000


def stored(response_id: str, principal: str = "alice", text: str = "x") -> StoredResponse:
    return StoredResponse(principal, {"id": response_id}, [Message(role="user", content=text)], session=response_id)


def is_stored(store: ResponseStore, response_id: str, principal: str = "alice") -> bool:
    try:
        return store.get(response_id, principal).id == response_id
    except APIError:
        return False


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_response_is_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    init, threads = StoredResponse.__init__, list[bool]()

    def watched(self: StoredResponse, *arguments: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        init(self, *arguments)

    monkeypatch.setattr(StoredResponse, "__init__", watched)
    monkeypatch.setattr(json_route, "INLINE_BYTES", 4096)
    app, path = app_with(FakeEngine("x")), "/v1/responses"
    metadata = {f"key{number}": "x" * 512 for number in range(16)}
    for fields in ({}, {"metadata": metadata, "store": False}, {"metadata": metadata}):
        assert fetch(app, "POST", path, {"input": "x", "stream": stream, **fields}).status_code == 200
    assert threads == [True, False]


def test_large_responses_evict_only_their_principals() -> None:
    store = ResponseStore(100, 60, BUDGET_BYTES)
    store.put(stored("bobs", "bob"))
    for number in range(50):
        store.put(stored(str(number), text="x" * 3000))
    assert [is_stored(store, str(number)) for number in (46, 47, 48, 49)] == [False, True, True, True]
    store.put(stored("huge", text="x" * BUDGET_BYTES))
    assert not is_stored(store, "huge") and is_stored(store, "49") and is_stored(store, "bobs", "bob")
    store.delete("49", "alice")
    store.put(stored("next", text="x" * 3000))
    assert is_stored(store, "47") and is_stored(store, "next")


def test_a_principal_sees_and_deletes_only_its_own() -> None:
    store = ResponseStore(2, 60, BUDGET_BYTES)
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
    store = ResponseStore(2, 0, BUDGET_BYTES)
    store.put(stored("a"))
    with pytest.raises(APIError):
        store.get("a", "alice")
    store.put(stored("b"))  # removes the expired one, and does not fail when nothing is left


def test_keys_share_the_total_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"alice": {"key": "alices-key"}, "bob": {"key": "bobs-secret"}}
    monkeypatch.setattr(store, "RESPONSES_BYTES", 10_000)
    app = app_with(FakeEngine("x"), auth__keys=keys)

    def is_kept(**metadata: str) -> bool:
        headers = {"Authorization": "Bearer alices-key"}
        response_id = fetch(app, "POST", "/v1/responses", {"input": "x", "metadata": metadata}, headers=headers).json()["id"]
        return fetch(app, "GET", f"/v1/responses/{response_id}", headers=headers).status_code == 200

    assert is_kept() and not is_kept(**{f"key{number}": "x" * 512 for number in range(9)})
