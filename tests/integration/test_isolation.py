"""Two tenants: nothing that one sends shows in what the other gets, nor in how drafts for it fare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Served, serving
from tests.integration.test_server import body

ALICE, BOB = "alices-secret-key", "bobs-secret-key"
PECULIAR = "def quite_peculiar_name(first_thing, second_thing):\n    return merge(first_thing, second_thing)\n\n\n" * 6


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("keys") / "config.yaml"
    config.write_text(f"auth: {{keys: {{alice: {ALICE}, bob: {BOB}}}}}\nmodel: {{dtype: float32}}\n")
    with serving("--config", str(config), key=BOB) as server:
        yield server


def ask(server: Served, key: str, **fields: Any) -> dict[str, Any]:
    asked = body(server, max_tokens=80, speculation={"report": True}, **fields)
    response = server.http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("drafter", ["fusion", "trigram", "lookup", "lookahead"])
def test_what_one_sent_helps_no_draft_of_the_other(own: Served, drafter: str) -> None:
    """Same session id, same prompt: only the key differs. Steps, drafts and cached tokens are as if nobody else were here."""
    fields: dict[str, Any] = {"prompt": PECULIAR, "temperature": 0.3, "seed": 1, "session_id": f"shared {drafter}"}
    chosen = {"speculation": {"drafter": drafter, "report": True, "max_nodes": 24}}

    def steps(key: str, **more: Any) -> tuple[Any, ...]:
        found = ask(own, key, **fields | chosen | more)
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["text"], found["speculation"], cached

    def ask(server: Served, key: str, **fields: Any) -> dict[str, Any]:
        asked = body(server, max_tokens=80) | fields
        response = server.http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    alone = steps(BOB, session_id=f"never used before {drafter}")
    for _ in range(3):
        taught = steps(ALICE)
    assert taught[2] > 0  # her own second request found her session
    after = steps(BOB)
    assert after == alone
    again = steps(BOB)
    assert again[2] > 0  # and his own finds his


def test_one_tenants_flood_does_not_keep_the_other_waiting(own: Served) -> None:
    """Turns go round: with a hundred requests of hers in the queue, his first one is next."""
    import asyncio

    async def run() -> list[str]:
        order: list[str] = []
        async with httpx.AsyncClient(base_url=own.url, timeout=60) as client:

            async def one(name: str, key: str) -> None:
                asked = body(own, max_tokens=30, temperature=1.0, ignore_eos=True)
                response = await client.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == 200
                order.append(name)

            flood = [asyncio.ensure_future(one("alice", ALICE)) for _ in range(40)]
            while "outrider_requests_waiting 3" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.005)
            await one("bob", BOB)
            at = len(order)
            await asyncio.gather(*flood)
            return order[:at]

    assert len(asyncio.run(run())) < 25


def test_a_response_belongs_to_its_key(own: Served) -> None:
    made = own.client.responses.create(model=own.model, input="hello", max_output_tokens=4)
    as_alice = {"Authorization": f"Bearer {ALICE}"}
    assert own.http.get(f"/v1/responses/{made.id}").status_code == 200
    assert own.http.get(f"/v1/responses/{made.id}", headers=as_alice).status_code == 404
    assert own.http.delete(f"/v1/responses/{made.id}", headers=as_alice).status_code == 404
    going_on = {"model": own.model, "input": "and?", "previous_response_id": made.id}
    assert own.http.post("/v1/responses", json=going_on, headers=as_alice).status_code == 404
