"""Compiles the drafters' inner loops with numba: without the GIL, cached on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
from numba import njit

PACKAGE = Path(__file__).parents[1]


def source_digest(folder: Path) -> str:
    """A hash of all Python sources below `folder`, 16 hexadecimal digits."""
    sources = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


# Numba's cache detects changes in a kernel's own file, but not in the kernels that it calls. The cache folder is
# therefore keyed by all sources together.
CACHE_FOLDER = Path(numba.config.CACHE_DIR or PACKAGE / "__pycache__") / f"kernels-{source_digest(PACKAGE)}"
numba.config.CACHE_DIR = str(CACHE_FOLDER)

# Kernels write into preallocated arrays and allocate nothing, so they need no numba runtime. Its reference counting
# costs more than the work itself where arrays are passed in nested tuples.
kernel = njit(cache=True, nogil=True, _nrt=False)

# For kernels that build tables, which must allocate memory.
allocating_kernel = njit(cache=True, nogil=True)
