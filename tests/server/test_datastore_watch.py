"""Datastores and tables are built from files; a watched one follows its working tree, and reads only what has changed."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.drafters.options import RetrievalOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.tables import datastore
from outrider.drafters.tables.array_file import ArrayFile, ArrayFileError
from outrider.models import TARGET
from outrider.server import datastore_builder, datastore_watch
from outrider.server.batches import batches
from outrider.server.datastore_builder import DatastoreError
from outrider.server.datastore_watch import Update, Watcher, watch
from outrider.verify.tokenizer import load_tokenizer
from tests.drafts import Driven
from tests.server.test_datastore_tree import make_repository, write

TOKENIZER = load_tokenizer(str(TARGET))
FILES = {
    "one.py": "def one(first):\n    return first\n",
    "two.py": "def two(second):\n    return second\n",
    ".gitignore": "no.py\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "tree", FILES)


@pytest.fixture
def watcher(root: Path, tmp_path: Path) -> Iterator[Watcher]:
    made = Watcher(root, tmp_path / "store", str(TARGET))
    made.update()
    yield made
    made.close()


@pytest.fixture
def store(watcher: Watcher, tmp_path: Path) -> Path:
    return tmp_path / "store"


def block(store: Path) -> ArrayFile:
    [found] = datastore.open_blocks(store)  # one block, whatever the number of updates: drafters depend on it
    return found


def texts(store: Path) -> set[str]:
    """The documents of the store's block, whose suffix array must be complete."""
    tokens, order = block(store).arrays["tokens"], block(store).arrays["order"]
    assert sorted(order.tolist()) == list(range(len(tokens)))
    ends = np.flatnonzero(tokens == len(TOKENIZER))
    return {TOKENIZER.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]}


def update(watcher: Watcher) -> Update:
    """The update that two polls of a changed tree make."""
    assert watcher.poll() is None
    found = watcher.poll()
    assert found is not None
    return found


def test_an_edit_appears_and_a_deletion_disappears(root: Path, watcher: Watcher, store: Path) -> None:
    write(root, {"one.py": "def one(third):\n", "deep/three.py": "three = 3\n"})
    found = update(watcher)
    assert (found.changed, found.deleted, found.files) == (2, 0, 4)
    assert texts(store) == {FILES["two.py"], FILES[".gitignore"], "def one(third):\n", "three = 3\n"}
    assert found.tokens == datastore.describe(store).tokens
    (root / "two.py").unlink()
    found = update(watcher)
    assert (found.changed, found.deleted, found.files) == (0, 1, 3)
    assert FILES["two.py"] not in texts(store)
    for path in root.rglob("*.py"):
        path.unlink()
    (root / ".gitignore").unlink()
    assert update(watcher).tokens == 0
    assert texts(store) == set()


def test_only_changed_files_are_tokenized(
    root: Path, watcher: Watcher, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []

    def recorded(texts: Iterator[tuple[datastore_watch.Document, str]], *bounds: Any) -> Iterator[Any]:
        for batch in batches(texts, *bounds):
            tokenized.extend(document.path for document, _ in batch)
            yield batch

    monkeypatch.setattr(datastore_watch, "batches", recorded)
    write(root, {"one.py": "one = 1\n"})
    (root / "two.py").touch()
    update(watcher)
    assert tokenized == ["one.py"]
    (root / "two.py").touch()
    version = datastore.version(store)
    assert [watcher.poll() for _ in range(3)] == [None] * 3
    assert datastore.version(store) == version
    watcher.close()
    write(root, {"three.py": "three = 3\n"})
    continued = Watcher(root, store, str(TARGET))
    continued.update()
    continued.close()
    assert tokenized == ["one.py", "three.py"]
    assert texts(store) == {"one = 1\n", "three = 3\n", FILES["two.py"], FILES[".gitignore"]}


@pytest.mark.parametrize("damage", ["manifest.json", "*.json", "*.block", "truncated"])
def test_a_damaged_store_is_built_again(root: Path, watcher: Watcher, store: Path, damage: str) -> None:
    watcher.close()
    if damage == "truncated":
        path = next(store.glob("*.block"))
        path.write_bytes(path.read_bytes()[:-100])
    else:
        for path in store.glob(damage):
            path.write_text('{"root": 7}')
    again = Watcher(root, store, str(TARGET))
    assert again.update().changed == 3
    assert texts(store) == set(FILES.values())
    again.close()


def test_a_folder_that_cannot_be_the_store_is_refused(root: Path, watcher: Watcher, store: Path, tmp_path: Path) -> None:
    other = make_repository(tmp_path / "other", {"a.py": "a"})
    foreign = tmp_path / "foreign"
    write(foreign, {"precious.txt": "p"})
    (tmp_path / "file").write_text("f")
    for place, folder, words in (
        (root, store, "is updated by another `outrider datastore watch`"),
        (root, foreign, "was not made by `outrider datastore watch`; give a new folder"),
        (root, tmp_path / "file", "cannot be written"),
        (root, root, "was not made by"),
    ):
        with pytest.raises(DatastoreError, match=words):
            Watcher(place, folder, str(TARGET))
    watcher.close()
    with pytest.raises(DatastoreError, match=r"is the datastore of .*tree; give another folder"):
        Watcher(other, store, str(TARGET))
    Watcher(root, store, str(TARGET)).close()  # the refusal has released the lock


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_watch(root: Path, watcher: Watcher, name: signal.Signals) -> None:
    before = signal.getsignal(name)
    updates: list[Update] = []

    def report(update: Update) -> None:
        updates.append(update)
        if len(updates) == 1:
            write(root, {"one.py": "one = 1\n"})
        else:
            signal.raise_signal(name)

    watch(watcher, 0.001, report)
    assert [update.changed for update in updates] == [0, 1]
    assert signal.getsignal(name) == before


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.py").write_text("def add(left, right):\n    return left + right\n")
    (folder / "b.jsonl").write_text(json.dumps({"text": "def add(one, two):\n    return one\n"}) + "\n")
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


def drafted(folder: Path, text: str) -> set[str]:
    tokenizer = load_tokenizer(str(TARGET))
    drafter = Driven(RetrievalDrafter(datastore.load(folder), RetrievalOptions()))
    drafter.begin(np.array(tokenizer.encode(text), np.int32))
    tree = drafter.propose(32)
    return {tokenizer.decode(tree.path(row)) for row in range(len(tree))}


def test_a_suffix_datastore_is_built_and_appended_to(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    made = datastore_builder.build_suffix([corpus], out, str(TARGET), append=False)
    assert made.documents == 2
    assert "left" in drafted(out, "def add(")
    (tmp_path / "more.txt").write_text("def add(first, second):\n")
    assert datastore_builder.build_suffix([tmp_path / "more.txt"], out, str(TARGET), append=True).documents == 3
    assert {"left", "first"} <= drafted(out, "def add(")
    datastore.merge(tmp_path / "both", [out, out])
    assert datastore.describe(tmp_path / "both").documents == 6
    assert datastore_builder.describe(out)["kind"] == "suffix"


def test_errors_are_sentences(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="no file or folder"):
        datastore_builder.find_files([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatastoreError, match="No text files"):
        datastore_builder.find_files([tmp_path / "empty"])
    with pytest.raises(ArrayFileError, match="not a datastore folder"):
        datastore_builder.build_suffix([corpus], tmp_path / "empty", str(TARGET), append=True)
    with pytest.raises(ArrayFileError, match="is not a datastore file"):
        datastore_builder.describe(corpus / "image.png")
    with pytest.raises(ArrayFileError, match="not a datastore folder"):
        datastore.merge(tmp_path / "x", [tmp_path / "empty"])
