"""Compiled kernels are cached by all sources together, release the GIL and cannot allocate.

What numba does not document for users exists in the installed version, and does what it is used for.
"""

import os
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.errors import TypingError
from numpy.typing import NDArray

from outrider.drafters.kernel import (
    PACKAGE,
    NotCached,
    allocating_kernel,
    kernel,
    pread,
    source_digest,
    without_compiling,
)


def test_the_digest_depends_on_every_source_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    called = tmp_path / "tables" / "called.py"
    (tmp_path / "caller.py").write_text("from tables.called import one\n")
    called.write_text("one = 1\n")
    digests = [source_digest(tmp_path), source_digest(tmp_path)]
    (tmp_path / "notes.txt").write_text("no source")
    digests.append(source_digest(tmp_path))
    assert len(set(digests)) == 1
    called.write_text("one = 2\n")
    assert source_digest(tmp_path) != digests[0]
    called.write_text("one = 1\n")
    assert source_digest(tmp_path) == digests[0]
    (tmp_path / "tables" / "new.py").write_text("")
    (tmp_path / "tables" / "another.py").write_text("two = 2\n")
    assert source_digest(tmp_path) != digests[0]


def test_the_cache_folder_is_keyed_by_the_drafters_sources() -> None:
    assert (PACKAGE / "kernel.py").is_file()
    assert Path(numba.config.CACHE_DIR).name == f"kernels-{source_digest(PACKAGE)}"


def double(values: NDArray[np.int64]) -> None:
    for i in range(len(values)):
        values[i] *= 2


def three_zeros() -> NDArray[np.float64]:
    return np.zeros(3)


def four_zeros() -> NDArray[np.float64]:
    return np.zeros(4)


def test_kernels_write_into_the_arrays_they_are_given() -> None:
    compiled = kernel(double)
    values = np.arange(4)
    compiled(values)
    assert values.tolist() == [0, 2, 4, 6]
    assert compiled.targetoptions["nogil"]


def test_only_an_allocating_kernel_may_allocate() -> None:
    assert allocating_kernel(three_zeros)().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(TypingError, match="zeros"):
        kernel(four_zeros)()


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that are made in the test find nothing in numba's cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


@kernel
def multiply(values: NDArray[np.int64], factor: int) -> None:
    for i in range(len(values)):
        values[i] *= factor


def multiply_twice(values: NDArray[np.int64], factors: NDArray[np.int32]) -> None:
    multiply(values, 2)
    multiply(values, factors[0])


@pytest.mark.usefixtures("empty_cache")
def test_kernels_call_each_other_with_plain_integers() -> None:
    values = np.arange(3)
    kernel(multiply_twice)(values, np.array([5], np.int32))
    assert values.tolist() == [0, 10, 20]
    factors = [signature[1] for signature in multiply.signatures]
    assert factors == [numba.int64], f"numba {numba.__version__} compiles a kernel for each kind of integer; see kernel.py."


def read(file: int, target: NDArray[np.uint8]) -> int:
    return int(pread(file, target.ctypes.data, len(target), 1))


def test_a_kernel_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"drafts")
    target = np.zeros(3, np.uint8)
    file = os.open(tmp_path / "text", os.O_RDONLY)
    try:
        assert kernel(read)(file, target) == 3
    finally:
        os.close(file)
    assert target.tobytes() == b"raf"


def negate(values: NDArray[np.int64]) -> None:
    for i in range(len(values)):
        values[i] = -values[i]


@pytest.mark.usefixtures("empty_cache")
def test_what_would_have_to_be_compiled_is_refused() -> None:
    values = np.arange(3)
    compiled = kernel(negate)
    with without_compiling(), pytest.raises(NotCached):
        compiled(values)
    compiled(values)
    with without_compiling():
        compiled(values)
        kernel(negate)(values)  # in the cache on disk
    assert values.tolist() == [0, -1, -2]
