"""Datastores on disk and array files are built and read in pages; unusable ones are rejected."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import Ints
from outrider.drafters.options import RetrievalOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.tables import array_file, datastore
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.pages import PAGE_WORDS, SMALL_BYTES, in_memory, open_pages
from outrider.drafters.tables.suffix import KIND
from tests.drafters.tables.internals import word
from tests.drafts import Driven

SEPARATOR = 70_000  # does not fit in uint16


def tokens(*documents: list[int]) -> Ints:
    return np.array([t for document in documents for t in (SEPARATOR, *document)], np.int32)


def followers(folder: Path, context: list[int]) -> list[int]:
    drafter = Driven(RetrievalDrafter(datastore.load(folder, "f"), RetrievalOptions()))
    drafter.begin(np.array(context, np.int32))
    tree = drafter.propose(16)
    return sorted(tree.tokens[tree.parents == -1].tolist())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    datastore.build(tmp_path / "d", [tokens([1, 2, 69_999]), tokens([1, 2, 4], [9, 9])], SEPARATOR, "f")
    return tmp_path / "d"


def test_build_and_describe(store: Path) -> None:
    assert followers(store, [1, 2]) == [4, 69_999]
    found = datastore.describe(store)
    assert (found.blocks, found.documents, found.tokens, found.fingerprint) == (2, 3, 8, "f")


def test_an_interrupted_build_leaves_the_datastore_before(store: Path) -> None:
    def broken() -> Iterator[Ints]:
        yield tokens([1, 2, 3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        datastore.build(store, broken(), SEPARATOR, "f")
    assert followers(store, [1, 2]) == [4, 69_999]
    datastore.build(store, [tokens([1, 2, 3])], SEPARATOR, "f")
    assert followers(store, [1, 2]) == [3]
    assert [path.name for path in store.parent.iterdir()] == ["d"]


def test_unusable_datastores_are_rejected(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ArrayFileError, match="not a datastore folder"):
        datastore.load(tmp_path / "nothing")
    with pytest.raises(ArrayFileError, match="another tokenizer"):
        datastore.load(store, "yours")
    path = next(store.glob("*.block"))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ArrayFileError, match="truncated"):
        datastore.load(store)


@pytest.mark.parametrize("name", ["tokens", "order", "first", "slots", "rows"])
def test_an_inconsistent_block_is_rejected(store: Path, name: str) -> None:
    path = next(store.glob("*.block"))
    arrays = dict(array_file.load(path, KIND).arrays)
    array_file.save(path, KIND, "f", arrays | {name: arrays[name][:0]}, separator=str(SEPARATOR))
    with pytest.raises(ArrayFileError, match="build the datastore again"):
        datastore.load(store)
    array_file.save(path, KIND, "f", {key: arrays[key] for key in arrays if key != name}, separator=str(SEPARATOR))
    with pytest.raises(ArrayFileError, match="lacks arrays of a block"):
        datastore.load(store)


def test_a_manifest_names_the_current_blocks(store: Path) -> None:
    assert len(datastore.load(store)) == 2
    old = datastore.version(store)
    assert old == datastore.version(store)
    datastore.write_manifest(store, ["000001.block"])
    assert followers(store, [1, 2]) == [4]
    assert datastore.version(store) != old
    assert datastore.version(store / "nothing") is None


@pytest.mark.parametrize("name", ["folder", "file", "link"])
def test_nothing_but_a_datastore_is_replaced(store: Path, name: str) -> None:
    """Nor what has a name that a build could use for its own files."""
    parent = store.parent
    (parent / "file").write_text("precious")
    (parent / "folder").mkdir()
    (parent / "folder" / "keep.block").write_text("precious")
    (parent / "folder" / "keep.py").write_text("precious")
    (parent / "link").symlink_to(store)
    for beside in ("d.old", "d.partial", "table.partial"):
        (parent / beside).write_text("precious")
    before = sorted(parent.rglob("*"))
    with pytest.raises(ArrayFileError, match="exists and is no datastore"):
        datastore.build(parent / name, [tokens([1, 2, 3])], SEPARATOR, "f")
    with pytest.raises(ArrayFileError, match="exists and is no table"):
        array_file.check_out(parent / name, "ngram")
    datastore.build(store, [tokens([1, 2, 3]), tokens([4])], SEPARATOR, "f")
    assert sorted(parent.rglob("*")) == before and (parent / "d.old").read_text() == "precious"


@pytest.mark.parametrize("path", ["file/d", "missing/table", "d"])
def test_what_cannot_be_written_is_a_sentence(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "d").mkdir()
    with pytest.raises(ArrayFileError, match="cannot be written"):
        array_file.save(tmp_path / path, "ngram", "f", {"a": np.zeros(3, np.uint32)})
    with pytest.raises(ArrayFileError, match="cannot be written"):
        datastore.build(tmp_path / "file/d", [tokens([1])], SEPARATOR, "f")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["d", "file"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"blocks": 7}', '{"blocks": [7]}', '{"blocks": ["../d/000000.block"]}', "[" * 100_000]
)
def test_a_damaged_manifest_is_rejected(store: Path, text: str) -> None:
    (store / datastore.MANIFEST).write_text(text)
    with pytest.raises(ArrayFileError, match=r"manifest\.json is damaged; delete .* and build the datastore again"):
        datastore.load(store)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    array_file.save(path, "ngram", "f", {"a": np.arange(1000, dtype=np.uint32), "b": np.ones((2, 3), np.uint16)})
    return path


def test_round_trip_is_read_only(saved: Path) -> None:
    file = array_file.load(saved, "ngram", "f")
    assert file.arrays["a"].tolist() == list(range(1000))
    assert file.arrays["b"].shape == (2, 3)
    assert not file.arrays["a"].flags.writeable
    assert not list(saved.parent.glob("*.partial"))


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0{bad}", b"\x02\0\0\0\0\0\0\0[]"])
def test_file_of_another_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(ArrayFileError):
        array_file.load(tmp_path / "foreign", "ngram")


def test_truncated_file(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(ArrayFileError, match="truncated"):
        array_file.load(saved, "ngram")


def test_a_file_of_another_kind_or_tokenizer(saved: Path) -> None:
    with pytest.raises(ArrayFileError, match="not a version"):
        array_file.load(saved, "suffix")
    with pytest.raises(ArrayFileError, match="another tokenizer; build it again"):
        array_file.load(saved, "ngram", "another")


@pytest.mark.parametrize(
    "change", [{"dtype": "F8"}, {"data_offsets": [8, 0]}, {"data_offsets": None}, {"shape": [7]}, {"shape": "x"}]
)
def test_inconsistent_header(saved: Path, change: dict[str, Any]) -> None:
    data = saved.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["a"] |= change
    changed = json.dumps(header).encode()
    saved.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
    with pytest.raises(ArrayFileError, match="not a datastore file"):
        array_file.load(saved, "ngram")


def test_saving_does_not_change_a_mapped_file(saved: Path) -> None:
    before = array_file.load(saved, "ngram").arrays["a"]
    array_file.save(saved, "ngram", "f", {"a": np.zeros(3, np.uint32)})
    assert before.tolist() == list(range(1000))
    assert array_file.load(saved, "ngram").arrays["a"].tolist() == [0, 0, 0]


SIZE = 8 * SMALL_BYTES // 4 + 100  # words; the last page is not full


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "large"
    np.arange(SIZE, dtype=np.uint32).tofile(path)
    return path


def test_a_large_file_is_read_through_a_small_cache(large: Path) -> None:
    opened = open_pages(large)
    assert opened.words.nbytes <= 4 * SIZE / 4
    indices = [*np.random.default_rng(0).integers(0, SIZE, 5000).tolist(), 0, SIZE - 1]
    assert [word(opened, index) for index in indices] == indices


def test_truncated_pages_read_as_zeros(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    np.full(4 * PAGE_WORDS, 7, np.uint32).tofile(path)
    opened = open_pages(path)
    os.truncate(path, 4 * (PAGE_WORDS + 3))
    assert [word(opened, index) for index in (0, PAGE_WORDS + 2, PAGE_WORDS + 3, 3 * PAGE_WORDS)] == [7, 7, 0, 0]


def test_a_file_is_closed_with_its_last_user(large: Path) -> None:
    first = open_pages(large)
    second = first._replace(numbers=first.numbers)  # shares the cache
    descriptor = first.file
    del first
    assert os.fstat(descriptor).st_size == large.stat().st_size
    del second
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@given(st.lists(st.lists(st.integers(0, (1 << 16) - 1), max_size=700), min_size=1, max_size=4))
def test_arrays_in_memory_are_concatenated(values: list[list[int]]) -> None:
    arrays = {str(i): np.array(list_, np.uint16 if i % 2 else np.uint32) for i, list_ in enumerate(values)}
    opened, offsets = in_memory(arrays)
    for name, array in arrays.items():
        words = [word(opened, offsets[name] + i) for i in range(-(-array.nbytes // 4))]
        assert np.array(words, np.uint32).tobytes()[: array.nbytes] == array.tobytes()
