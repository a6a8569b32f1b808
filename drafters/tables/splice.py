"""Updates a suffix array after documents were deleted from its text or added to it, without sorting the whole text again.

Deleting leaves the order of the other positions as it is, and the positions of added documents are inserted by bisection.
Here a separator *follows* each document, so that appending a document does not change how an earlier one ends.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native
from outrider.drafters.tables.suffix import sort_suffixes

# If at least one in this many tokens is new, sorting the whole text is faster.
SORT_RATIO = 4


def splice(
    tokens: NDArray[Any], order: NDArray[np.uint32], kept: NDArray[np.bool_], added: NDArray[Any], separator: int
) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """The text without the positions that are not `kept` (bool [T], whole documents), then `added`; and its suffix array.

    `tokens` and `added` are any integer [T] and [A], each empty or with a `separator` at the end; `order` is the suffix array
    of `tokens`.
    """
    text = np.concatenate([tokens[kept], added.astype(tokens.dtype)])
    if len(added) * SORT_RATIO >= len(text):
        return text, sort_suffixes(text)
    positions = (np.cumsum(kept, dtype=np.int64) - 1).astype(np.uint32)  # positions in the new text
    old = positions[order[kept[order]]]
    new = (sort_suffixes(added) + len(old)).astype(np.uint32)
    at = np.zeros(len(new), np.int64)
    _find_places(text.astype(np.uint32), old, new, separator, at)
    return text, np.insert(old, at, new)


@native
def _find_places(
    text: NDArray[np.uint32], old: NDArray[np.uint32], new: NDArray[np.uint32], separator: int, at: NDArray[np.int64]
) -> None:
    """Sets at[i] to the index in `old` before which new[i] belongs; both are sorted."""
