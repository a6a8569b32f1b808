"""Corpora over HTTP: texts, bounds, and isolation of keys; and how they are indexed, by the real process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider import models
from outrider.drafters.tables import datastore
from outrider.drafters.tables.suffix import sort_suffixes
from outrider.server.corpora import registry
from outrider.server.corpora.indexer import answer, read_listing
from outrider.server.corpora.messages import Change, NewDocument, Outcome
from outrider.server.corpora.registry import Corpora
from outrider.server.corpora.shelves import Usage, short_digest
from outrider.server.http.errors import APIError
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from tests.server.fakes import FakeEngine, app_with

PATH = "/v1/outrider/corpora"
KEYS = {"alice": "alices-secret-key", "bob": "bobs-secret-key"}
Send = Callable[..., Awaitable[httpx.Response]]


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[Send]:
    """Sends requests on one event loop, in the lifespan of the application."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:

            async def send(method: str, path: str, body: Any = None, key: str = "none") -> httpx.Response:
                return await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})

            yield send


def files(**texts: str) -> list[dict[str, str]]:
    return [{"path": path, "text": text} for path, text in texts.items()]


async def ok(response: Awaitable[httpx.Response]) -> Any:
    answered = await response
    assert answered.status_code == 200, answered.text
    return answered.json()


async def fails(response: Awaitable[httpx.Response], status: int, words: str) -> None:
    answered = await response
    assert answered.status_code == status and words in answered.json()["error"]["message"], answered.text


async def test_a_corpus_is_made_changed_listed_and_deleted() -> None:
    async with running(app_with(FakeEngine("a"))) as send:
        made = await ok(send("POST", PATH, {"name": "a.b-c", "files": files(x="one two", y="three"), "texts": ["four"]}))
        assert (made["object"], made["name"], made["files"], made["default"]) == ("corpus", "a.b-c", 3, False)
        changed = await ok(send("POST", PATH, {"name": "a.b-c", "files": files(x="one"), "remove": ["y"], "texts": ["four"]}))
        assert changed["files"] == 2 and 0 < changed["tokens"] < made["tokens"]
        one = await ok(send("GET", f"{PATH}/a.b-c"))
        assert "x" in one["paths"] and len(one["paths"]) == 2
        assert [each["name"] for each in (await ok(send("GET", PATH)))["data"]] == ["a.b-c"]
        metrics = (await send("GET", "/metrics")).text
        assert "outrider_corpora 1.0" in metrics and f"outrider_corpora_bytes {float(one['bytes'])}" in metrics
        assert (await ok(send("DELETE", f"{PATH}/a.b-c")))["deleted"] is True
        await fails(send("GET", f"{PATH}/a.b-c"), 404, "There is no corpus 'a.b-c'")
        await fails(send("DELETE", f"{PATH}/a.b-c"), 404, "There is no corpus")


async def test_a_request_chooses_a_corpus_or_uses_the_default() -> None:
    engine = FakeEngine("a")
    async with running(app_with(engine)) as send:
        for name in ("one", "two"):
            await ok(send("POST", PATH, {"name": name, "texts": [name], "default": name == "one"}))
        chosen: list[dict[str, Any]] = [{"speculation": {"corpus": "two"}}, {}]
        for fields in chosen:
            await ok(send("POST", "/v1/completions", {"model": models.NAME, "prompt": "x", **fields}))
        await ok(send("POST", "/v1/responses", {"model": models.NAME, "input": "x", "speculation": {"corpus": "two"}}))
        await ok(send("POST", PATH, {"name": "one", "default": False}))
        await ok(send("POST", "/v1/completions", {"model": models.NAME, "prompt": "x"}))
        missing = {"model": models.NAME, "prompt": "x", "speculation": {"corpus": "three"}}
        await fails(send("POST", "/v1/completions", missing), 404, "There is no corpus 'three'")
    names = [each.corpus and Path(each.corpus).parent.name for each in engine.requests]
    assert names == [name and short_digest(name) for name in ("two", "one", "two", None)]


async def test_keys_have_their_own_corpora() -> None:
    engine = FakeEngine("a")
    async with running(app_with(engine, auth__keys=KEYS)) as send:
        await ok(send("POST", PATH, {"name": "repo", "texts": ["alice's"], "default": True}, KEYS["alice"]))
        await fails(send("GET", f"{PATH}/repo", key=KEYS["bob"]), 404, "There is no corpus")
        assert (await ok(send("GET", PATH, key=KEYS["bob"])))["data"] == []
        body = {"model": models.NAME, "prompt": "x"}
        await fails(send("POST", "/v1/completions", {**body, "speculation": {"corpus": "repo"}}, KEYS["bob"]), 404, "no corpus")
        await ok(send("POST", "/v1/completions", body, KEYS["bob"]))
        await ok(send("POST", PATH, {"name": "repo", "texts": ["bob's"]}, KEYS["bob"]))
        await ok(send("DELETE", f"{PATH}/repo", key=KEYS["bob"]))
        assert (await ok(send("GET", f"{PATH}/repo", key=KEYS["alice"])))["files"] == 1
    assert [each.corpus for each in engine.requests] == [None]


async def test_corpora_outlive_a_restart_with_the_sessions(tmp_path: Path) -> None:
    async with running(app_with(FakeEngine("a"), sessions__folder=str(tmp_path / "s"))) as send:
        await ok(send("POST", PATH, {"name": "default", "texts": ["one"], "default": True}))
    async with running(app_with(FakeEngine("a"), sessions__folder=str(tmp_path / "s"))) as send:
        (corpus,) = (await ok(send("GET", PATH)))["data"]
        assert (corpus["name"], corpus["files"], corpus["default"]) == ("default", 1, True)
        assert (await ok(send("POST", PATH, {"name": "default", "texts": ["two"]})))["files"] == 2
    (block, *_) = sorted((tmp_path / "s").rglob("*.block"))
    assert datastore.load_block(block).size > 0
    assert block.parents[1].stat().st_mode & 0o077 == 0  # others cannot read the texts


async def test_documents_without_text_take_room() -> None:
    async with running(app_with(FakeEngine("a"), corpora__total_bytes=100_000)) as send:
        empty = [{"path": f"{number}" + 1000 * "x", "text": ""} for number in range(100)]
        await fails(send("POST", PATH, {"name": "a", "files": empty}), 400, "Nothing was changed.")
        made = await ok(send("POST", PATH, {"name": "a", "files": empty[:10]}))
        assert made["files"] == 10 and made["bytes"] > 10 * 1000


async def test_the_documents_of_a_corpus_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_DOCUMENTS", 3)
    async with running(app_with(FakeEngine("a"))) as send:
        await ok(send("POST", PATH, {"name": "a", "files": files(x="1", y="2", z="")}))
        await fails(send("POST", PATH, {"name": "a", "files": files(w="")}), 400, "would have 4 documents, and 3 are allowed")
        await ok(send("POST", PATH, {"name": "a", "files": files(w="", x="3"), "remove": ["y", "y", "x", "none"]}))
        assert (await ok(send("GET", f"{PATH}/a")))["paths"] == ["z", "w", "x"]


async def test_the_corpora_of_all_models_share_the_bound(tmp_path: Path) -> None:
    async def encode(texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.arange(1000, dtype=np.uint32) for _ in texts]

    def corpora(model: str, usage: Usage) -> Corpora:
        flags: Any = {
            "sessions.folder": str(tmp_path / model),
            "corpora.total_bytes": 30_000,
            "auth.keys": {"alice": "long-enough"},
        }
        return Corpora(load_settings(None, flags), lambda: "x", 2000, Metrics(), usage)

    async def post(each: Corpora, name: str) -> None:
        await each.change("alice", name, {"path": "text"}, (), encode, None)

    usage = Usage([tmp_path / model for model in ("one", "two")])
    one, two = corpora("one", usage), corpora("two", usage)
    await post(one, "a")
    await post(two, "b")
    with pytest.raises(APIError, match=r"corpora\.total_bytes"):
        await asyncio.gather(post(one, "c"), post(two, "d"))
    await one.close()
    later = corpora("two", Usage([tmp_path / model for model in ("one", "two")]))  # after a restart
    with pytest.raises(APIError, match=r"corpora\.total_bytes"):
        for name in "efg":
            await post(later, name)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.block")) < 30_000
    await two.close()
    await later.close()


@pytest.mark.parametrize("name", ["../x", "..", ".x", "", "a/b", "a\u00e9", "x" * 65])
async def test_names_that_could_be_paths_are_refused(name: str) -> None:
    async with running(app_with(FakeEngine("a"))) as send:
        response = await send("POST", PATH, {"name": name, "texts": ["a"]})
        assert response.status_code == 400 and "a corpus's name has 1 to 64 letters" in response.json()["error"]["message"]


SEPARATOR = 50


def change(folder: Path, texts: dict[str, list[int]], removed: tuple[str, ...] = (), max_bytes: int = 1 << 20) -> Outcome:
    added = [NewDocument(path, str(ids), np.array(ids, np.uint32).tobytes()) for path, ids in texts.items()]
    return answer(Change(str(folder / "corpus"), "corpus", [*removed], added, SEPARATOR, "f", max_bytes))


Texts = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 5), max_size=12), max_size=4)


@given(st.lists(st.tuples(Texts, st.sets(st.sampled_from("abcdef"), max_size=2)), min_size=1, max_size=4))
def test_changes_have_the_outcome_of_indexing_anew(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[dict[str, list[int]], set[str]]]
) -> None:
    folder, expected = tmp_path_factory.mktemp("corpora"), dict[str, list[int]]()
    for texts, removed in changes:
        outcome = change(folder, texts, tuple(removed))
        kept = {path: ids for path, ids in expected.items() if path not in texts and path not in removed}
        expected = kept | texts
        assert outcome.listing is not None, outcome
        assert {document.path for document in outcome.listing.documents} == expected.keys()
        assert outcome.listing.tokens == sum(map(len, expected.values()))
        block = datastore.open_block(folder / "corpus" / outcome.listing.block, "f")
        in_order = [expected[document.path] for document in outcome.listing.documents]
        text = np.array([token for ids in in_order if ids for token in (*ids, SEPARATOR)], np.uint32)
        assert np.array_equal(block.arrays["tokens"], text)
        assert len(text) == 0 or np.array_equal(np.sort(block.arrays["order"]), np.sort(sort_suffixes(text)))


def test_a_change_beyond_the_bound_leaves_the_corpus_as_it_was(tmp_path: Path) -> None:
    first = change(tmp_path, {"a": [1, 2, 3]})
    assert first.listing is not None
    outcome = change(tmp_path, {"b": [4] * 500}, max_bytes=first.size_bytes + 8)
    assert outcome.listing is None and outcome.size_bytes > first.size_bytes + 8
    assert read_listing(tmp_path / "corpus") == first.listing
    assert [path.name for path in (tmp_path / "corpus").glob("*.block")] == [first.listing.block]


def test_the_block_before_stays_for_requests_that_have_chosen_it(tmp_path: Path) -> None:
    blocks = [outcome.listing.block for token in range(3) if (outcome := change(tmp_path, {"a": [token]})).listing]
    assert sorted(path.name for path in (tmp_path / "corpus").glob("*.block")) == blocks[1:]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "principal").mkdir()
    (tmp_path / "principal").chmod(0o777)
    assert "not this user's own" in change(tmp_path / "principal", {"a": [1]}).error


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None])
def test_why_a_change_failed_names_no_file(tmp_path: Path, damage: bytes | None) -> None:
    """The front end logs it."""
    first = change(tmp_path, {"a": [1, 2, 3]})
    assert first.listing is not None
    block = tmp_path / "corpus" / first.listing.block
    block.unlink()
    if damage is None:
        block.mkdir()
    else:
        block.write_bytes(damage)
    error = change(tmp_path, {"b": [4]}).error
    assert error and str(tmp_path) not in error and "corpus" not in error
