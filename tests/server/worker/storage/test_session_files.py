"""Sessions outlive a store: same text, rows and tables; damaged, foreign and too many files cost a log line at most."""

from __future__ import annotations

import copy
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from outrider import models
from outrider.drafters.options import Options, PearlOptions
from outrider.drafters.registry import Resources, arrays_of
from outrider.drafters.sequence import Ints
from outrider.server.worker.saver import Saver
from outrider.server.worker.session import SessionKey
from outrider.server.worker.sessions import SessionStore
from outrider.server.worker.storage import session_files, session_format
from outrider.server.worker.storage.contents import Contents
from outrider.server.worker.storage.model_digest import model_digest
from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_folder import LOCK, PAGE, PARTIAL, SESSION, ForeignFolder, flush, hidden
from outrider.server.worker.storage.session_format import Fits, page_path, rows_digest
from outrider.verify.decode import finish
from outrider.verify.generation import DecodeOptions, Generation
from outrider.verify.measurement import machine_key
from outrider.verify.model.cache import paging
from outrider.verify.model.cache.paging import distinct_rows
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import SamplingParams
from tests.hub import MODEL, cache_models, commit_of
from tests.language import ToyModel

LONG = np.arange(64, dtype=np.int32) % 90
OPTIONS = DecodeOptions(SamplingParams(temperature=0), max_tokens=6)


@pytest.fixture(scope="module", autouse=True, params=[16, 256])
def page_tokens(request: pytest.FixtureRequest) -> Iterator[int]:
    """Pages that a text has several of, or not one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "PAGE_TOKENS", request.param)
        yield request.param


def new_store(
    runner: ModelRunner, folder: Path, model: str = "model", max_bytes: int = 1 << 30, **options: Any
) -> SessionStore:
    files = SessionFiles(folder, model, max_bytes, Fits.of(runner))
    return SessionStore(runner, **{"capacity": 4, "ttl_seconds": 60, "automatic": True, "files": files, **options})


def answer(
    store: SessionStore, prompt: Ints, name: str | None = None, principal: str = "p"
) -> tuple[int, Ints, dict[str, Any]]:
    """The number of reused tokens, the text with the answer, and the drafter's tables before it."""
    session = store.acquire(principal, name, prompt)
    assert session is not None
    drafter = session.drafter("trigram", Resources())
    tables = {key: array.copy() for key, array in arrays_of(drafter).items()}
    generation = Generation(session.verifier, drafter, prompt, OPTIONS)
    text = np.concatenate([prompt, np.array(finish(generation).tokens, np.int32)])
    store.release(session)
    return generation.reused_tokens, text, tables


def save(store: SessionStore) -> None:
    """Saves all sessions that have changed."""
    assert store._saver is not None
    while any(not (session.busy or session.saved) for session in store._sessions.values()):
        store.save()
        store._saver.wait(60)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*"))


def sessions_in(folder: Path) -> list[Path]:
    return [file for file in files_in(folder) if file.suffix == SESSION]


def pages_in(folder: Path) -> list[Path]:
    return [file for file in files_in(folder) if file.suffix == PAGE]


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_in(folder))


def content_of(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the labels of a session's file."""
    with safe_open(file, "pt") as opened:
        return {key: opened.get_tensor(key).clone() for key in opened.keys()}, opened.metadata()  # noqa: SIM118


@pytest.mark.parametrize("name", [None, "with a name"])
def test_a_session_outlives_its_store(tiny_runner: ModelRunner, tmp_path: Path, name: str | None) -> None:
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


def test_restored_sessions_share_pages(tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int) -> None:
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
    owners: dict[str, set[paging.Page]] = {"p": set(), "another": set()}
    for (owner, _), session in second._sessions.items():
        owners[owner].update(session.verifier.rows.pages)
    assert len(owners["another"]) == len(LONG) // page_tokens
    assert not owners["p"] & owners["another"]


def test_sessions_are_saved_one_by_one_and_only_after_a_change(tiny_runner: ModelRunner, tmp_path: Path) -> None:
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


def test_a_file_of_another_model_is_not_loaded(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG)
    save(store)
    assert len(new_store(tiny_runner, tmp_path, model="another")) == 0
    assert len(new_store(tiny_runner, tmp_path)) == 1


def test_the_revision_of_a_hub_id_identifies_the_model(
    tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("damage", ["header", "cut", "rows", "text"])
def test_a_damaged_file_costs_one_log_line(
    tiny_runner: ModelRunner, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG)
    save(store)
    [file] = sessions_in(tmp_path)
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    match damage:
        case "header":
            content[9] ^= 0xFF
        case "cut":
            content = content[:-100]
        case "text":
            content[-1] ^= 0xFF
        case "rows":
            content[start + (len(content) - start) // 2] ^= 0xFF
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "outrider.worker"):
        fresh = new_store(tiny_runner, tmp_path, slots=1)
        reused, _, _ = answer(fresh, np.concatenate([text, [7]]).astype(np.int32))
    if reused:  # the damage is in a drafter's table, which changes no answer
        assert damage in ("rows", "text")
    else:
        assert len(caplog.records) == 1
    assert len(fresh._free) + len(fresh) == 1


def test_damaged_rows_are_noticed(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    session = store.acquire("p", "a", LONG)
    assert session is not None
    finish(Generation(session.verifier, session.drafter("none", Resources()), LONG, OPTIONS))
    store.release(session)
    save(store)
    [file] = sessions_in(tmp_path)
    content = bytearray(file.read_bytes())
    content[-600] ^= 0xFF  # of the rows, because nothing else is as large
    file.write_bytes(content)
    fresh = new_store(tiny_runner, tmp_path, slots=1)
    assert len(fresh) == 1
    assert answer(fresh, LONG, "a")[0] == 0
    assert sessions_in(tmp_path) == []


@pytest.mark.parametrize("change", ["text", "rows", "type"])
def test_parts_that_do_not_fit_together_are_noticed(tiny_runner: ModelRunner, tmp_path: Path, change: str) -> None:
    """Another text, another number of rows or another type of the text, in a file that can be read."""
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG)
    save(store)
    [file] = sessions_in(tmp_path)
    tensors, labels = content_of(file)
    match change:
        case "text":
            tensors["text"] ^= 1
        case "rows":
            tensors["rows"] = torch.cat([tensors["rows"]] * 30, 3)
        case "type":
            tensors["text"] = tensors["text"].bfloat16()
    save_file(tensors, file, labels)
    assert len(new_store(tiny_runner, tmp_path)) == 0


def narrower(rows: torch.Tensor) -> torch.Tensor:
    layers, two, heads, length, width = rows.shape
    return rows.reshape(layers, two, heads * 2, length, width // 2)


@pytest.mark.parametrize("change", [narrower, torch.Tensor.bfloat16])
def test_files_with_valid_digests_and_other_rows_are_ignored(
    tiny_runner: ModelRunner,
    tmp_path: Path,
    change: Callable[[torch.Tensor], torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They cost one log line and that session."""
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    [file] = sessions_in(tmp_path)
    tensors, labels = content_of(file)
    for page in pages_in(tmp_path):
        rows = change(content_of(page)[0]["rows"])
        digest = rows_digest(rows)
        save_file({"rows": rows}, page_path(file.parent, digest))
        labels["pages"] = labels["pages"].replace(page.stem, digest)
    tensors["rows"] = change(tensors["rows"])
    save_file(tensors, file, labels | {"rest": rows_digest(tensors["rows"])})
    check_is_ignored(tiny_runner, tmp_path, text, caplog)


@pytest.mark.parametrize("change", ["token", "missing", "principal", "path"])
def test_a_file_that_is_not_a_session_of_its_folder_is_ignored(
    tiny_runner: ModelRunner, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    [file] = sessions_in(tmp_path)
    tensors, labels = content_of(file)
    match change:
        case "token":
            tensors["text"][3] = 1 << 30
            labels["text"] = session_format.text_digest(tensors["text"].numpy())
        case "missing":
            del tensors["rows"]
        case "principal":
            labels["principal"] = "another"
        case "path":
            labels["pages"] = " ".join(["../other"] * max(1, len(labels["pages"].split())))
    save_file(tensors, file, labels)
    check_is_ignored(tiny_runner, tmp_path, text, caplog)


def check_is_ignored(runner: ModelRunner, folder: Path, text: Ints, caplog: pytest.LogCaptureFixture) -> None:
    """A session costs one log line, and is not continued."""
    with caplog.at_level(logging.WARNING, "outrider.worker"):
        fresh = new_store(runner, folder, slots=1)
        reused, _, _ = answer(fresh, np.concatenate([text, [7]]).astype(np.int32), "a")
    used = sum(not session.verifier.is_swapped_out for session in fresh._sessions.values())
    assert (reused, len(fresh._free) + used) == (0, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "removed", "another's"])
def test_a_damaged_page_costs_the_sessions_that_name_it_and_is_written_again(
    tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    if page_tokens > len(LONG):
        pytest.skip("the text has no whole page")
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    answer(store, LONG[::-1].copy(), "b")
    save(store)
    _, labels = content_of(page_of("a", tmp_path))
    first, second = (page_path(page_of("a", tmp_path).parent, digest) for digest in labels["pages"].split()[:2])
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    match damage:
        case "changed":
            first.write_bytes(content)
        case "cut":
            first.write_bytes(content[:-1])
        case "removed":
            first.unlink()
        case "another's":
            first.write_bytes(second.read_bytes())
    check_is_ignored(tiny_runner, tmp_path, text, caplog)
    healed = new_store(tiny_runner, tmp_path)
    assert answer(healed, np.concatenate([LONG[::-1], [7]]).astype(np.int32), "b")[0] >= len(LONG) - 1  # the other session
    answer(healed, LONG, "a")
    save(healed)
    assert answer(new_store(tiny_runner, tmp_path), np.concatenate([text, [7]]).astype(np.int32), "a")[0] >= len(text) - 1


def page_of(name: str, folder: Path) -> Path:
    """The file of a named session."""
    return next(file for file in sessions_in(folder) if file.stem == hidden(name))


def test_a_next_turn_writes_its_new_pages_and_its_own_file(tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    before = {file: file.stat().st_ino for file in pages_in(tmp_path)}
    answer(store, np.concatenate([text, LONG[:32]]).astype(np.int32), "a")
    save(store)
    after = {file: file.stat().st_ino for file in pages_in(tmp_path)}
    assert {file: after[file] for file in before} == before
    assert len(after) - len(before) == (2 if page_tokens == 16 else 0)


def test_pages_that_no_session_names_are_removed_once_they_are_old(
    tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server that is idle, or at the start; another server may be about to name a new one."""
    store = new_store(tiny_runner, tmp_path)
    other = LONG[::-1].copy()
    for name, prompt in (("a", LONG), ("b", other), ("c", other)):
        answer(store, prompt, name)
    save(store)
    kept = {page for page in pages_in(tmp_path) if page.stem in content_of(page_of("b", tmp_path))[1]["pages"]}
    for name in ("a", "c"):
        store.forget(SessionKey("p", name))
    written = pages_in(tmp_path)
    new_store(tiny_runner, tmp_path)
    assert pages_in(tmp_path) == written and len(written) - len(kept) >= len(LONG) // page_tokens  # they are new
    monkeypatch.setattr(session_files, "UNNAMED_SECONDS", 0.0)
    store._files._sweep_at = 0.0  # type: ignore[union-attr]
    store.save()
    store._saver.wait(60)  # type: ignore[union-attr]
    assert set(pages_in(tmp_path)) == kept


def test_a_page_that_was_removed_meanwhile_is_written_again(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    for page in pages_in(tmp_path):
        page.unlink()
    _, text, _ = answer(store, np.concatenate([text, [7]]).astype(np.int32), "a")
    save(store)
    assert answer(new_store(tiny_runner, tmp_path), np.concatenate([text, [7]]).astype(np.int32), "a")[0] >= len(text) - 1


def flip_byte(array: torch.Tensor) -> torch.Tensor:
    array.view(-1).view(torch.uint8)[0] ^= 1
    return array


@pytest.mark.parametrize("change", [flip_byte, torch.Tensor.bfloat16])
def test_damaged_arrays_of_a_drafter_are_not_used(
    tiny_runner: ModelRunner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The text and the rows are; numpy has no bfloat16."""
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    [file] = sessions_in(tmp_path)
    tensors, labels = content_of(file)
    name = max((name for name in tensors if name.startswith("trigram:")), key=lambda name: tensors[name].numel())
    tensors[name] = change(tensors[name])
    save_file(tensors, file, labels)
    longer = np.concatenate([text, [7]]).astype(np.int32)
    reused, _, tables = answer(new_store(tiny_runner, tmp_path), longer, "a")
    _, _, unlearned = answer(new_store(tiny_runner, tmp_path / "empty"), longer)
    assert reused >= len(text) - 1 and len(caplog.messages) == 1
    assert all((tables[key] == unlearned[key]).all() for key in unlearned)


def test_what_an_older_version_has_learned_is_refused_in_one_line(
    tiny_runner: ModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text and the rows are used, and the drafter begins anew."""
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    monkeypatch.setattr("outrider.drafters.registry.LAYOUT", 9)
    longer = np.concatenate([text, [7]]).astype(np.int32)
    reused, _, tables = answer(new_store(tiny_runner, tmp_path), longer, "a")
    _, _, unlearned = answer(new_store(tiny_runner, tmp_path / "empty"), longer)
    assert reused >= len(text) - 1
    assert all((tables[key] == unlearned[key]).all() for key in unlearned)
    [message] = caplog.messages
    assert message.startswith("what trigram has learned in ")
    assert message.endswith(" is not used: its layout is 1, and this version reads layout 9")


def test_a_drafter_without_a_draft_is_restored(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    """A chain of no tokens is false."""
    options = Options(pearl=PearlOptions(thrifty=False))
    resources = Resources(options, model=lambda: ToyModel(np.full((8, 8), 1 / 8)))
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    [session] = store._sessions.values()
    drafter = session.drafter("pearl", resources)
    drafter.load({**drafter.state(), "seconds": np.array([1.0, 2.0])}, session.verifier.sequence)
    save(store)
    session_again = new_store(tiny_runner, tmp_path).acquire("p", "a", text)
    assert session_again is not None
    assert session_again.drafter("pearl", resources).state()["seconds"].tolist() == [1, 2]


def test_the_folder_is_bounded(tiny_runner: ModelRunner, tmp_path: Path) -> None:
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


def test_what_is_removed_from_a_full_folder_is_no_page_that_another_session_names(
    tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int
) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG)
    _, text, _ = answer(store, np.concatenate([LONG[:50], [5, 5]]).astype(np.int32))
    save(store)
    assert len(sessions_in(tmp_path)) == 2
    SessionFiles(tmp_path, "model", bytes_in(tmp_path) - 1, Fits.of(tiny_runner))._trim()
    assert len(sessions_in(tmp_path)) == 1 and len(pages_in(tmp_path)) == len(text) // page_tokens
    assert answer(new_store(tiny_runner, tmp_path), np.concatenate([text, [7]]).astype(np.int32))[0] >= len(text) - 1


def test_an_evicted_session_stays_on_disk_and_is_found_there(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path, capacity=1)
    texts = []
    for number in range(3):
        texts.append(answer(store, LONG + number, str(number))[1])
        save(store)
    assert (len(store), len(sessions_in(tmp_path))) == (1, 3)
    for number, text in enumerate(texts):
        assert answer(store, np.concatenate([text, [7]]).astype(np.int32), str(number))[0] >= len(text) - 1


@pytest.mark.parametrize("name", [None, "a"])
def test_idle_sessions_move_between_servers_of_one_folder(tiny_runner: ModelRunner, tmp_path: Path, name: str | None) -> None:
    """Each turn goes to the other server, which continues what the one before has saved."""
    stores = [new_store(tiny_runner, tmp_path) for _ in range(2)]
    text = LONG
    for turn in range(4):
        before = len(text) - 3 if turn else 0
        reused, text, _ = answer(stores[turn % 2], text, name)
        assert reused >= before
        save(stores[turn % 2])
        text = np.concatenate([text, [turn, 7]]).astype(np.int32)
    assert len(sessions_in(tmp_path)) == 1


def test_servers_of_one_folder_leave_each_others_files(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    """A server with room for less, and one whose sessions expire."""
    now = [0.0]
    a = new_store(tiny_runner, tmp_path, capacity=6)
    texts = {name: answer(a, LONG + number, name)[1] for number, name in enumerate("abcdef")}
    save(a)
    small = new_store(tiny_runner, tmp_path, capacity=2, clock=lambda: now[0])
    assert (len(small), len(sessions_in(tmp_path))) == (2, 6)
    longer = np.concatenate([texts["f"], [7]]).astype(np.int32)
    answer(a, longer, "f")
    save(a)
    now[0] = 61.0
    small.expire()  # both of its sessions; f has changed since
    assert len(small) == 0 and len(sessions_in(tmp_path)) == 5
    assert answer(small, np.concatenate([longer, [8]]).astype(np.int32), "f")[0] >= len(longer) - 1


def test_a_file_that_changes_while_it_is_known_is_read_again(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    a = new_store(tiny_runner, tmp_path)
    answer(a, LONG, "s")
    save(a)
    b = new_store(tiny_runner, tmp_path)
    other = (LONG[::-1] + 3).astype(np.int32)
    _, changed, _ = answer(a, other, "s")
    save(a)
    assert answer(b, np.concatenate([changed, [7]]).astype(np.int32), "s")[0] >= len(changed) - 1
    assert len(sessions_in(tmp_path)) == 1


@pytest.mark.parametrize("is_busy", [True, False])
def test_what_another_server_saves_takes_no_session_from_memory_that_is_not_saved(
    tiny_runner: ModelRunner, tmp_path: Path, is_busy: bool
) -> None:
    """A new session of a name that both servers use; replaced, it would keep its slot for ever."""
    a, b = (new_store(tiny_runner, tmp_path, slots=2) for _ in range(2))
    own = a.acquire("p", "s", LONG)
    assert own is not None
    answer(b, LONG[::-1].copy(), "s")
    save(b)
    if not is_busy:
        finish(Generation(own.verifier, own.drafter("none", Resources()), LONG, OPTIONS))
        a.release(own)
    found = a.acquire("p", "s", LONG)
    assert found is (None if is_busy else own) and list(a._sessions.values()) == [own]
    assert len(a._free) == 1


def test_files_that_a_paused_session_came_from_are_not_read_again(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    """Its rows are its own since its request began, also where its new text is shorter than the saved one."""
    store = new_store(tiny_runner, tmp_path)
    long = np.concatenate([LONG, LONG[:40]])
    answer(store, long, "a")
    save(store)
    fresh = new_store(tiny_runner, tmp_path, slots=1)
    session = fresh.acquire("p", "a", long)
    assert session is not None
    session.verifier.truncate(50)
    fresh.pause(session)
    assert fresh._swap_out()
    for file in files_in(tmp_path):
        file.unlink()
    assert answer(fresh, long)[0] == 49


@pytest.mark.parametrize("suffix", [".tmpVVKlxA", ".session.abc.partial"])
def test_what_an_interrupted_writer_left_is_removed(tiny_runner: ModelRunner, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "model" / "owner"
    folder.mkdir(parents=True)
    left, written = folder / suffix, folder / f"x{PARTIAL}"
    left.write_bytes(b"x")
    with open(written, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another server is writing it
        new_store(tiny_runner, tmp_path)
    assert not left.exists() and written.exists()


def test_nobody_waits_for_a_session_that_is_being_saved(tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int) -> None:
    """Hundreds of MB; the bound is one page. What was written is not written again."""
    shape = (4, 2, 8, page_tokens, (16 << 20) // (64 * page_tokens))  # 64 MB
    pages = [paging.Page(torch.full(shape, number, dtype=torch.float32)) for number in range(4)]
    rows = paging.SwappedRows(pages, 4 * page_tokens, [])
    path = tmp_path / "model" / "owner" / "s.session"

    def contents() -> Contents:
        return Contents("p", "s", 1, LONG, pages, rows, rows.length, [], {})

    saver = Saver(SessionFiles(tmp_path, "model", 1 << 40, Fits.of(tiny_runner)))
    saver.start(path, contents())
    while not pages_in(tmp_path):
        time.sleep(0.01)
    started = time.monotonic()
    assert not saver.stop()
    assert time.monotonic() - started < 0.05
    saver.wait(60)
    written = {page: page.stat().st_ino for page in pages_in(tmp_path)}
    assert 0 < len(written) < 4 and written.keys() == set(files_in(tmp_path))
    saver.start(path, contents())
    saver.wait(60)
    saver.close()
    assert path.exists() and len(pages_in(tmp_path)) == 4
    assert {page: page.stat().st_ino for page in written} == written


def test_sessions_that_cannot_be_saved_in_time_are_left(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "a")
    store.save_all(0)
    assert files_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_costs_a_log_line(
    tiny_runner: ModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = new_store(tiny_runner, tmp_path / "file")
    answer(store, LONG)
    with caplog.at_level(logging.WARNING, "outrider.worker"):
        for _ in range(2):
            save(store)
    assert len(caplog.records) == 1


def test_files_that_cannot_be_removed_cost_a_log_line_each(
    tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{path} cannot be removed")

    monkeypatch.setattr(Path, "unlink", refuse)
    store = new_store(tiny_runner, tmp_path, capacity=1)
    answer(store, LONG, "kept")
    save(store)
    answer(store, LONG, "forgotten")
    save(store)
    store.forget(SessionKey("p", "forgotten"))
    assert len(caplog.messages) == 1
    SessionFiles(tmp_path, "model", 0, Fits.of(tiny_runner))._trim()
    assert len(caplog.messages) == 3 and len(sessions_in(tmp_path)) == 2


def test_a_file_that_another_process_removes_is_left_out(
    tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "a")
    save(store)
    [file] = sessions_in(tmp_path)
    removed = file.with_name(f"removed{SESSION}")
    monkeypatch.setattr(Path, "glob", lambda *_: [removed, file])
    assert len(new_store(tiny_runner, tmp_path)) == 1
    SessionFiles(tmp_path, "model", 0, Fits.of(tiny_runner))._trim()
    assert not file.exists()


@pytest.mark.parametrize("place", [".", "model"])
def test_a_folder_of_another_user_is_refused(
    tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "s")
    save(store)
    new_store(tiny_runner, tmp_path)
    (tmp_path / place).chmod(0o777)
    with pytest.raises(ForeignFolder, match="belongs to another user"):
        new_store(tiny_runner, tmp_path)
    (tmp_path / place).chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ForeignFolder, match="belongs to another user"):
        new_store(tiny_runner, tmp_path)


def test_every_folder_is_readable_by_the_owner_only(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path / "made")
    answer(store, LONG, "s")
    save(store)
    files = files_in(tmp_path / "made")
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in files[0].parents[:3]} == {0o700}


def test_a_file_is_replaced_at_once_or_stays_as_it_was(
    tiny_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_session_gets_no_name_whose_pages_another_server_has_removed(
    tiny_runner: ModelRunner, tmp_path: Path, page_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the writing of its pages and its name."""

    def remove_pages(file: BinaryIO) -> None:
        flush(file)
        for page in pages_in(tmp_path):
            page.unlink()

    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "a")
    monkeypatch.setattr(session_files, "flush", remove_pages)
    save(store)
    assert len(sessions_in(tmp_path)) == (page_tokens > len(LONG))


def test_a_session_gets_its_name_under_the_lock(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG, "a")
    (tmp_path / "model").mkdir(mode=0o700)
    saver = store._saver
    assert saver is not None
    with open(tmp_path / "model" / LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another server removes what no session names
        store.save()
        saver.wait(0.5)
        assert saver.is_busy and not sessions_in(tmp_path)
    saver.wait(60)
    assert len(sessions_in(tmp_path)) == 1


def test_servers_that_race_on_one_folder_leave_whole_files_only(tiny_runner: ModelRunner, tmp_path: Path) -> None:
    """Two servers with room for little save, read and remove the same sessions; whatever is in the folder can be read."""
    texts = [((LONG + number) % 90).astype(np.int32) for number in range(4)]
    first = new_store(tiny_runner, tmp_path)
    answer(first, texts[0], "name 0")
    save(first)
    small = 3 * bytes_in(tmp_path)
    failures: list[BaseException] = []

    def serve(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            store = new_store(tiny_runner, tmp_path, max_bytes=small, capacity=3)
            for _ in range(12):
                number = int(rng.integers(len(texts)))
                answer(store, texts[number], f"name {number}")
                if rng.random() < 0.2:
                    store.forget(SessionKey("p", f"name {number}"))
                save(store)
            store.save_all(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    files = SessionFiles(tmp_path, "model", 1 << 30, Fits.of(tiny_runner))
    assert sessions_in(tmp_path) and {file.suffix for file in files_in(tmp_path)} <= {SESSION, PAGE}
    for file in sessions_in(tmp_path):
        stored = files.open(file)
        assert stored is not None
        stored.rows.read()
