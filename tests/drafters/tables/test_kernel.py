"""Compiled kernels are cached by all sources together, release the GIL and cannot allocate."""

from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.errors import TypingError
from numpy.typing import NDArray

from outrider.drafters.tables.kernel import PACKAGE, allocating_kernel, kernel, source_digest


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
    assert (PACKAGE / "tables" / "kernel.py").is_file()
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
