"""The compiled library of vocabularies, with the types of its functions; None if it was installed without a compiler."""

import ctypes
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

POINTERS, NUMBER = c_void_p, c_int64
# By function: its result, then its arguments.
TYPES = {
    "pieces_scan": (NUMBER, POINTERS, NUMBER, NUMBER, POINTERS),
    "pieces_new": (POINTERS, c_char_p, POINTERS, NUMBER),
    "pieces_delete": (None, POINTERS),
    "pieces_find": (NUMBER, POINTERS, c_char_p, NUMBER),
    "pieces_complete": (None, POINTERS, POINTERS, POINTERS, POINTERS, NUMBER),
    "pieces_encode": (NUMBER, POINTERS, c_char_p, NUMBER, NUMBER, NUMBER, POINTERS),
}


def load() -> ctypes.CDLL | None:
    """The library. Raises ImportError for one of other sources."""
    file = next(iter(sorted(Path(__file__).parent.glob("_pieces.*"), reverse=True)), None)
    if file is None:
        return None
    found = ctypes.CDLL(str(file))
    for name, (result, *arguments) in TYPES.items():
        try:
            function = getattr(found, name)
        except AttributeError:
            raise ImportError(f"{file} was compiled from other sources; install the package again.") from None
        function.restype, function.argtypes = result, arguments
    return found


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


LIBRARY = load()
