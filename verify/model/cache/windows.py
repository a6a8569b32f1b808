"""Keeps rows of layers with a sliding window: those that windows at the text's end read, and some windows before.

No later row reads what is further behind than a window, so the memory of such rows returns to the system, page by page. A
margin is kept for rewinding, and one window of every SPACING: a text that goes back further is continued from the end of the
nearest window before, and read again from there. Layers without a window keep all rows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.shape import CacheShape

# The margin behind the window. An agent's next turn goes back by less.
MARGIN_TOKENS = 4096
# At least this many pages are released at once.
BATCH_PAGES = 4
# One in this many windows is kept.
SPACING = 8
# A forward adds at most this many tokens before rows are released.
FORWARD_TOKENS = 1024


class WindowedRows:
    """The pages of one slot that have rows of layers with a window; the others are released."""

    def __init__(self, window: int, discard: Callable[[slice], None]) -> None:
        """`window` is the largest of the layers'; `discard` returns the memory of their rows at these positions."""
        self.window = window
        self.released: set[int] = set()  # pages
        self._return = discard
        self._settled = 0  # pages before it are released, or kept for good

    def release(self, length: int) -> list[int]:
        """Releases the pages that no row after `length` needs, if they are a batch. Returns them."""
        end = (length - self.window - max(self.window, MARGIN_TOKENS)) // kv_cache.PAGE_TOKENS
        if end - self._settled < BATCH_PAGES:
            return []
        pages = [page for page in range(self._settled, end) if not is_kept(page, self.window)]
        self.released.update(pages)
        self._settled = end
        self._discard(pages)
        return pages

    def replace(self, released: Collection[int], length: int, before: int) -> None:
        """The slot, which had `before` rows, has `length` rows of a source with these pages released."""
        self.released, self._settled = set(released), max(released, default=-1) + 1
        self.truncate(length, before)
        self._discard(sorted(self.released))

    def truncate(self, length: int, before: int) -> None:
        """The rows from `length` on, up to `before`, will be written again; returns their memory if they are a batch."""
        end = length // kv_cache.PAGE_TOKENS
        self._settled = min(self._settled, end)
        self.released = {page for page in self.released if page < end}
        dropped = range(kv_cache.page_count(length, kv_cache.PAGE_TOKENS), kv_cache.page_count(before, kv_cache.PAGE_TOKENS))
        if len(dropped) >= BATCH_PAGES:
            self._discard(dropped)

    def _discard(self, pages: Iterable[int]) -> None:
        for start, end in spans(pages):
            # Again from the page before, since the system's pages do not begin where ours do.
            first = start - 1 if start - 1 in self.released else start
            self._return(slice(first * kv_cache.PAGE_TOKENS, end * kv_cache.PAGE_TOKENS))


def is_kept(page: int, window: int) -> bool:
    size = kv_cache.page_count(window, kv_cache.PAGE_TOKENS)
    return page % (SPACING * size) >= (SPACING - 1) * size


def held_positions(positions: int, window: int) -> int:
    """The most positions that a slot has of layers with this window, after a text of `positions`."""
    recent = window + max(window, MARGIN_TOKENS) + (BATCH_PAGES + 1) * kv_cache.PAGE_TOKENS + FORWARD_TOKENS
    size = kv_cache.page_count(window, kv_cache.PAGE_TOKENS) * kv_cache.PAGE_TOKENS
    return min(positions, recent + positions // (SPACING * size) * size)


def held_bytes(shape: CacheShape, positions: int) -> int:
    """The most bytes of keys and values that a slot has after a text of `positions`."""
    if shape.window is None or not shape.releases:
        return shape.bytes_for(positions)
    return shape.bytes_for(positions) - shape.windowed_bytes_for(positions - held_positions(positions, shape.window))


def reachable(length: int, window: int, released: Collection[int]) -> int:
    """The greatest length up to `length` whose last `window` rows are in pages that are not released."""
    size = kv_cache.PAGE_TOKENS
    while True:
        pages = range(max(0, length - window) // size, kv_cache.page_count(length, size))
        missing = next((page for page in pages if page in released), None)
        if missing is None:
            return length
        length = missing * size


def spans(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of consecutive pages, which ascend."""
    start = end = 0
    for page in pages:
        if page != end:
            if end > start:
                yield start, end
            start = page
        end = page + 1
    if end > start:
        yield start, end
