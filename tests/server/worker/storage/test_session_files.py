"""Sessions outlive a store: the same text, rows and tables. What has not changed is not written again, and texts find it."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import models
from outrider.drafters.registry import arrays_of
from outrider.drafters.sequence import Ints, common_prefix
from outrider.server.worker.storage.prefix_index import BLOCK_TOKENS, PrefixIndex
from outrider.server.worker.storage.session_files import model_digest
from outrider.verify.measurement import machine_key
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import distinct_rows
from outrider.verify.model.torch_runner import TorchRunner
from tests.hub import MODEL, cache_models, commit_of
from tests.server.worker.storage.stores import LONG, answer, bytes_in, files_in, new_store, pages_in, save, sessions_in

pytestmark = pytest.mark.usefixtures("page_tokens")


@pytest.mark.parametrize("name", [None, "with a name"])
def test_a_session_outlives_its_store(tiny_runner: TorchRunner, tmp_path: Path, name: str | None) -> None:
    first = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(first, LONG, name)
    session = next(iter(first._sessions.values()))
    learned = {key: array.copy() for key, array in arrays_of(session.drafters["trigram"]).items()}
    save(first)
    assert len(sessions_in(tmp_path)) == 1
    second = new_store(tiny_runner, tmp_path)
    longer = np.concatenate([text, [7, 8]]).astype(np.int32)
    reused, continued, tables = answer(second, longer, name)
    assert reused >= len(text) - 1
    assert tables.keys() == learned.keys() and all((tables[key] == learned[key]).all() for key in learned)
    assert answer(new_store(tiny_runner, tmp_path / "empty"), longer)[1].tolist() == continued.tolist()
    assert answer(new_store(tiny_runner, tmp_path), longer, name, principal="another")[0] == 0


def test_restored_sessions_share_pages(tiny_runner: TorchRunner, tmp_path: Path, page_tokens: int) -> None:
    """In the bytes that are counted, and in memory; a page of another principal is another page."""
    first = new_store(tiny_runner, tmp_path)
    prompts = [LONG, np.concatenate([LONG[:40], [5, 5, 5]]).astype(np.int32)]
    texts = [answer(first, prompt)[1] for prompt in prompts]
    answer(first, LONG, principal="another")
    save(first)
    assert len(pages_in(tmp_path)) == (9 if page_tokens == 16 else 0)  # 4, and 3 of which 2 are the same, and 4 of another
    second = new_store(tiny_runner, tmp_path)
    for store in (first, second):
        rows = [session.verifier.rows for (owner, _), session in store._sessions.items() if owner == "p"]
        assert distinct_rows(rows) == sum(each.length for each in rows) - 40 // page_tokens * page_tokens
    for text in texts:
        assert answer(second, np.concatenate([text, [7]]).astype(np.int32))[0] >= len(text) - 1
    owners: dict[str, set[kv_cache.Page]] = {"p": set(), "another": set()}
    for (owner, _), session in second._sessions.items():
        owners[owner].update(session.verifier.rows.pages)
    assert len(owners["another"]) == len(LONG) // page_tokens
    assert not owners["p"] & owners["another"]


def test_sessions_are_saved_one_by_one_and_only_after_a_change(tiny_runner: TorchRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "a")
    answer(store, LONG[::-1].copy(), "b")
    for expected in (1, 2, 2):
        store.save()
        assert store._saver is not None
        store._saver.wait(60)
        assert len(sessions_in(tmp_path)) == expected
    times = [file.stat().st_mtime_ns for file in sessions_in(tmp_path)]
    save(store)
    assert [file.stat().st_mtime_ns for file in sessions_in(tmp_path)] == times
    answer(store, LONG, "a")
    save(store)
    assert [file.stat().st_mtime_ns for file in sessions_in(tmp_path)] != times


def test_the_revision_of_a_hub_id_identifies_the_model(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_models(monkeypatch, tmp_path, {"main": models.TARGET, "v1": models.TARGET})
    digests = [model_digest(MODEL, tiny_runner, revision) for revision in ("main", "v1", commit_of("v1"))]
    assert digests[0] != digests[1] == digests[2]
    wider = copy.copy(tiny_runner)
    wider.cache_shape = replace(tiny_runner.cache_shape, layers=tiny_runner.cache_shape.layers[:1])
    assert model_digest(MODEL, wider, "main") != digests[0]
    coded = copy.copy(tiny_runner)
    coded.cache_shape = replace(tiny_runner.cache_shape, coded=torch.int8)
    assert model_digest(MODEL, coded, "main") != digests[0]
    assert machine_key(coded) != machine_key(tiny_runner)  # of measured costs


def test_the_folder_is_bounded(tiny_runner: TorchRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "first")
    save(store)
    [first] = sessions_in(tmp_path)
    size = bytes_in(tmp_path)
    bounded = new_store(tiny_runner, tmp_path, max_bytes=size + 100)
    answer(bounded, LONG[::-1].copy(), "second")
    save(bounded)
    [left] = sessions_in(tmp_path)
    assert left != first and bytes_in(tmp_path) <= size + 100
    assert answer(new_store(tiny_runner, tmp_path), LONG[::-1].copy(), "second")[0] >= len(LONG) - 1


def test_a_file_is_replaced_at_once_or_stays_as_it_was(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    before = {file: file.read_bytes() for file in files_in(tmp_path)}

    def fail(*_: Any) -> None:
        raise OSError("the server ends here")

    answer(store, np.concatenate([text, LONG]).astype(np.int32)[: len(text) + 10], "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        save(store)
    assert {file: file.read_bytes() for file in files_in(tmp_path)} == before


def blocks(*parts: int) -> Ints:
    """A blocks of blocks, each filled with one token."""
    return np.repeat(np.array(parts, np.int32), BLOCK_TOKENS)


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=5))
def test_found_texts_share_as_many_blocks_as_any(texts: list[list[int]], prompt: list[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for number, parts in enumerate(texts):
        index.put(number, "alice", blocks(*parts))
    shared = [common_prefix(blocks(*parts), blocks(*prompt)) // BLOCK_TOKENS for parts in texts]
    best = max(shared)
    expected = {number for number, count in enumerate(shared) if count == best} if best else set()
    assert set(index.find("alice", blocks(*prompt))) == expected
