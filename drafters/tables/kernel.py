"""How the drafters' inner loops are compiled: without the GIL, kept in numba's cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
from numba import njit

# Numba's cache notices a change in a kernel's own file, but not in a kernel that it calls. So compiled kernels are cached
# under a hash of all sources together.
PACKAGE = Path(__file__).parents[1]
_version = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(PACKAGE.rglob("*.py")))).hexdigest()[:16]
numba.config.CACHE_DIR = str(Path(numba.config.CACHE_DIR or PACKAGE / "__pycache__") / f"kernels-{_version}")

# A kernel writes into arrays that it is given and allocates none. So it can do without numba's run time, which would
# count references to those arrays at every turn; in nested tuples of arrays that costs more than the work.
kernel = njit(cache=True, nogil=True, _nrt=False)

# For building tables, where memory is needed along the way.
allocating_kernel = njit(cache=True, nogil=True)
