"""What guesses: drafters and the DraftTree they all speak. Imports neither `server` nor `verify`, and no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba

# Numba's cache knows when a kernel's own file has changed, but not when a kernel that it calls has. So compiled kernels are
# kept apart by the text of all of them together.
_sources = sorted(Path(__file__).parent.glob("*.py"))
_version = hashlib.sha256(b"".join(source.read_bytes() for source in _sources)).hexdigest()[:16]
_folder = Path(numba.config.CACHE_DIR or Path(__file__).parent / "__pycache__")
numba.config.CACHE_DIR = str(_folder / f"kernels-{_version}")
