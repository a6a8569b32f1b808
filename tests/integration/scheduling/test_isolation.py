"""Two keys: requests of one do not affect the other's answers, drafts, sessions or responses."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.requests import body
from tests.servers import ALICE, BOB, PECULIAR, Served

PROMPT = f"{PECULIAR}\n\n" * 6


@pytest.fixture(scope="module")
def server(guarded: Served) -> Iterator[Served]:
    with guarded.login(BOB) as server:
        yield server


def fetch(server: Served, key: str, **fields: Any) -> dict[str, Any]:
    content = body(server, max_tokens=80) | fields
    response = server.http.post("/v1/completions", json=content, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("drafter", ["fusion", "trigram", "lookup", "lookahead"])
def test_drafters_do_not_learn_across_keys(server: Served, drafter: str) -> None:
    """Same session id, same prompt, another key: steps, drafts and cached tokens are those of a fresh server."""
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.3, "seed": 1, "session_id": f"shared {drafter}"}
    chosen = {"speculation": {"drafter": drafter, "report": True, "max_nodes": 24}}

    def steps(key: str, **more: Any) -> tuple[Any, ...]:
        found = fetch(server, key, **fields | chosen | more)
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["text"], found["speculation"], cached

    fresh = steps(BOB, session_id=f"never used before {drafter}")
    for _ in range(3):
        cached_answer = steps(ALICE)
    assert cached_answer[2] > 0  # Alice's second request reused her session
    after = steps(BOB)
    assert after == fresh
    again = steps(BOB)
    assert again[2] > 0  # and Bob's reused his
