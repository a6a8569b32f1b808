"""Words equal the file's in any order of access and with any cache size."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables.pages import PAGE_WORDS, SMALL_BYTES, in_memory, open_pages, word

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
