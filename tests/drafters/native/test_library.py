"""The compiled library as the drafters call it: what it refuses, and what works without it."""

import ctypes
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.drafters.lookup import append, new_automaton
from outrider.drafters.native import library
from outrider.drafters.native.library import structure


@pytest.mark.parametrize("tokens", [np.zeros(4, np.int64), np.zeros(8, np.int32)[::2]])
def test_arrays_of_other_types_and_layouts_are_refused(tokens: NDArray[np.int32]) -> None:
    with pytest.raises(TypeError, match="needs a contiguous array of int32"):
        append(new_automaton(64), tokens)


def test_a_library_of_other_sources_is_refused() -> None:
    with pytest.raises(ImportError, match="compiled from other sources; install the package again"):

        @structure
        class Nodes(NamedTuple):
            tokens: NDArray[np.int32]

    with pytest.raises(ImportError, match="compiled from other sources"):
        library.symbol("no_such_function", ctypes.c_void_p)


def test_without_the_library_only_calls_fail() -> None:
    program = """
import ctypes, pathlib
pathlib.Path.glob = lambda *_: []
from outrider.drafters.registry import Resources, make
make("prediction", Resources())
try:
    make("lookup", Resources())
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [library.MISSING]
