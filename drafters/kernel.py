"""How the drafters' inner loops are compiled: without the GIL, kept in numba's cache."""

from __future__ import annotations

from numba import njit

# A kernel writes into arrays that it is given and allocates none. So it can do without numba's run time, which would
# count references to those arrays at every turn; in nested tuples of arrays that costs more than the work.
kernel = njit(cache=True, nogil=True, _nrt=False)

# For building tables, where memory is needed along the way.
allocating_kernel = njit(cache=True, nogil=True)
