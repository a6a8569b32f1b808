"""Several servers use one folder: they leave each other's files, and no other user reads them."""

import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from outrider.server.worker.session import SessionKey
from outrider.server.worker.storage import session_files
from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_folder import PAGE, PARTIAL, SESSION, ForeignFolder
from outrider.server.worker.storage.session_format import Fits
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.storage.stores import (
    LONG,
    answer,
    bytes_in,
    content_of,
    files_in,
    new_store,
    page_of,
    pages_in,
    save,
    sessions_in,
)

pytestmark = pytest.mark.usefixtures("page_tokens")


def test_pages_that_no_session_names_are_removed_once_they_are_old(
    tiny_runner: TorchRunner, tmp_path: Path, page_tokens: int, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("name", [None, "a"])
def test_idle_sessions_move_between_servers_of_one_folder(tiny_runner: TorchRunner, tmp_path: Path, name: str | None) -> None:
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


def test_servers_of_one_folder_leave_each_others_files(tiny_runner: TorchRunner, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("suffix", [".tmpVVKlxA", ".session.abc.partial"])
def test_what_an_interrupted_writer_left_is_removed(tiny_runner: TorchRunner, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "model" / "owner"
    folder.mkdir(parents=True)
    left, written = folder / suffix, folder / f"x{PARTIAL}"
    left.write_bytes(b"x")
    with open(written, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another server is writing it
        new_store(tiny_runner, tmp_path)
    assert not left.exists() and written.exists()


@pytest.mark.parametrize("place", [".", "model"])
def test_a_folder_of_another_user_is_refused(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
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


def test_every_folder_is_readable_by_the_owner_only(tiny_runner: TorchRunner, tmp_path: Path) -> None:
    store = new_store(tiny_runner, tmp_path / "made")
    answer(store, LONG, "s")
    save(store)
    files = files_in(tmp_path / "made")
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in files[0].parents[:3]} == {0o700}


def test_servers_that_race_on_one_folder_leave_whole_files_only(tiny_runner: TorchRunner, tmp_path: Path) -> None:
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
