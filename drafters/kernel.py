"""Compiles the drafters' inner loops with numba: without the GIL, cached on disk.

All that is used of numba without being documented for users stands here: the option `_nrt`, the method `get_call_template` of
compiled functions, `types.ExternalFunction`, and the events of its compiler. Tested with numba 0.68.
`tests/drafters/test_kernel.py` fails if one of them is missing or does something else.

Without `_nrt`, kernels compute the same, but count references. Without `get_call_template`, they compile in three times the
time. Without `ExternalFunction`, `ctypes` can call `pread`, but kernels that do are not cached. Without events, a start waits
until all kernels are compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba import njit, types
from numba.core.event import Event, Listener, install_listener

PACKAGE = Path(__file__).parent


def source_digest(folder: Path) -> str:
    """A hash of all Python sources below `folder`, 16 hexadecimal digits."""
    sources = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


# Numba's cache detects changes in a kernel's own file, but not in the kernels that it calls. The cache folder is
# therefore keyed by all sources together.
CACHE_FOLDER = Path(numba.config.CACHE_DIR or PACKAGE / "__pycache__") / f"kernels-{source_digest(PACKAGE)}"
numba.config.CACHE_DIR = str(CACHE_FOLDER)


# A function of the C library. Numba resolves it by its name, so kernels that call it remain cacheable.
pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class NotCached(Exception):
    """A kernel is not in numba's cache."""


class _Refusal(Listener):  # type: ignore[misc]
    """Raises NotCached when a compilation starts."""

    def on_start(self, event: Event) -> None:
        raise NotCached

    def on_end(self, event: Event) -> None:
        """Required by numba; nothing to do."""


@contextmanager
def without_compiling() -> Iterator[None]:
    """Inside the context, a call of a kernel that would have to be compiled raises NotCached instead."""
    with install_listener("numba:compile", _Refusal()):
        yield


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a kernel that writes into preallocated arrays and allocates nothing.

    So it needs no numba runtime, whose reference counting costs more than the work itself where arrays are passed in nested
    tuples.
    """
    return _with_plain_integers(njit(cache=True, nogil=True, _nrt=False)(function))


def allocating_kernel(function: Callable[..., Any]) -> Any:
    """Compiles a kernel that builds tables, which must allocate memory."""
    return _with_plain_integers(njit(cache=True, nogil=True)(function))


def _with_plain_integers(compiled: Any) -> Any:
    """Calls from other kernels pass every signed integer as int64.

    Otherwise numba compiles a kernel, and all that it calls, once more for each constant and each width: a third of the time.
    """
    resolve = compiled.get_call_template

    def get_call_template(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return resolve(tuple(map(_plain, args)), {name: _plain(each) for name, each in kws.items()})

    compiled.get_call_template = get_call_template
    return compiled


def _plain(type_: Any) -> Any:
    type_ = types.unliteral(type_)
    return types.int64 if isinstance(type_, types.Integer) and type_.signed else type_
