"""Corpora that clients post while the server runs: drafts, and isolation of keys."""

from typing import Any

from tests.servers import BOB, Served

# Nothing that the servers' tables know.
TEXT = "xylograph quince wombat marmalade zephyr axolotl bramble\n"
PROMPT = "xylograph quince wombat"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def post(server: Served, key: str, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/outrider/corpora", json=fields, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def complete(server: Served, key: str, **speculation: Any) -> tuple[str, int]:
    """An answer, and how many nodes of its first step come from a corpus."""
    fields = {"model": server.model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    chosen = {"drafter": "retrieval", "report": True, **speculation}
    answer = server.http.post("/v1/completions", json={**fields, "speculation": chosen}, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["text"], body["speculation"]["drafted_tokens"].get("retrieval", 0)


def test_drafts_come_from_the_corpus_that_a_request_chooses(guarded: Served) -> None:
    plain, drafted = complete(guarded, BOB)
    assert drafted == 0
    made = post(guarded, BOB, name="words", files=[{"path": "a.txt", "text": TEXT}])
    assert made["files"] == 1 and made["tokens"] > 5
    text, drafted = complete(guarded, BOB, corpus="words")
    assert (text, drafted > 0) == (plain, True)
    assert complete(guarded, BOB) == (plain, 0)
    post(guarded, BOB, name="words", files=[{"path": "a.txt", "text": "something else"}])
    assert complete(guarded, BOB, corpus="words") == (plain, 0)  # the text was replaced
