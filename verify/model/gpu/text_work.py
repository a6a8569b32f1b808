"""How the text before a forward's rows is divided among programs: the host lists the work once for all layers.

A piece of work is one split of a stream's text for a tile of its rows, whose query heads share a key head. Splits begin at
fixed positions, so a row's sums do not depend on how many rows, streams or programs there are. The numbers of rows for
which forwards are captured are here, too.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# 72 and 136: a root and 71 or 135 nodes, up to a multiple of the tensor cores' tiles.
ROWS = (1, 2, 4, 8, 16, 32, 64, 72, 128, 136, 256)
# Torch.compile makes a kernel of its own for one row, whose bits may differ. So where rows are to be invariant, one is padded.
INVARIANT_ROWS = ROWS[1:]
# The positions of a block of text. Where rows are invariant, the rows of a step lie in one block.
BLOCK = 64


def depth_left(length: int) -> int:
    """Positions of the block that follow the root, after `length` committed tokens."""
    return BLOCK - 1 - length % BLOCK


# The first splits of a text have this many keys: a few microseconds of one multiprocessor.
SPLIT_KEYS = 256
# After each SPLITS_PER_SIZE splits, the size doubles. A text of 4,096 positions has 16 splits, one of 131,072 has 81.
SPLITS_PER_SIZE = 16
# The most rows, and the keys, of a block by the largest head dimension for which they fit into the registers and the shared
# memory of each GPU (float32 with 256 fits into few).
BLOCKS = {128: (32, BLOCK), 256: (32, 32)}
FLOAT32_BLOCKS = {64: (32, 32), 128: (16, 32), 256: (16, 16)}
# With more rows, keys are read less often. Hopper's WGMMA instructions read their inputs from shared memory, so blocks of 64
# rows fit into the registers. Smaller blocks use other instructions, which may sum in another order: even one row has 64.
HOPPER, HOPPER_BLOCKS = 90, {128: (64, BLOCK), 256: (32, 32)}
HOPPER_ROWS = 64
# The tile size of the tensor cores.
MIN_BLOCK_ROWS = 16
# The fields of a piece of work, in the order in which kernels read them.
WORK_FIELDS = 6


class TextWork:
    """The sizes of a model's splits and tiles, and the work of each forward.

    A list is int64: the number of pieces, then WORK_FIELDS numbers for each: the stream's first row, its number of rows, the
    length of its text, where its pages begin, the tile and the split.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype, groups: int, positions: int, devices: Sequence[torch.device]) -> None:
        """`groups` are the most query heads per key head, `head_dim` the larger width of keys and values.

        `positions` is the longest context.
        """
        self._groups, self._split, self._parts = groups, SPLIT_KEYS, max(1, split_count(positions, SPLIT_KEYS))
        found = {capability(device) for device in devices}
        self._capability = found.pop() if len(found) == 1 else 0  # blocks that fit into each of several kinds
        self._sizes = head_dim, dtype, self._capability

    @property
    def sizes(self) -> dict[str, int]:
        """Positions of the first splits, the splits of the longest context, the GPUs' compute capability, and the groups.

        The kernels' blocks follow from these and from a forward's rows.
        """
        return {"split": self._split, "parts": self._parts, "capability": self._capability, "most_groups": self._groups}

    def most(self, rows: int) -> int:
        """The most numbers that a list has for up to `rows` rows."""
        return 1 + WORK_FIELDS * self._parts * rows * (1 + self._groups // MIN_BLOCK_ROWS)

    def split_count(self, length: int) -> int:
        """The number of splits of the whole blocks of a text."""
        return split_count(length // BLOCK * BLOCK, self._split)

    def listed(self, streams: NDArray[np.int64], splits: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
        """The work of a forward of `rows` rows, by the number of splits of each stream's text.

        `streams` is [4, S], the first four fields; pages are counted from the list's end.
        """
        tiles = -(-streams[1] * self._groups // attend_blocks(rows * self._groups, *self._sizes)[0])
        pieces = tiles * splits
        number = int(pieces.sum())
        stream = np.repeat(np.arange(len(tiles)), pieces)
        within = np.arange(number) - np.repeat(pieces.cumsum() - pieces, pieces)  # among its stream's
        work = np.empty((number, WORK_FIELDS), np.int64)
        work[:, :4] = streams.T[stream]
        work[:, 3] += 1 + work.size
        # The tiles of a split follow each other, because they read the same keys.
        work[:, 5], work[:, 4] = np.divmod(within, tiles[stream])
        return np.concatenate([[number], work.ravel()])


def split_count(positions: int, size: int) -> int:
    """The number of splits of a text of `positions` tokens. The first splits have `size` positions."""
    count = 0
    while positions > 0:
        count += min(SPLITS_PER_SIZE, -(-positions // size))
        positions, size = positions - SPLITS_PER_SIZE * size, 2 * size
    return count


def attend_blocks(rows: int, head_dim: int, dtype: torch.dtype, capability: int) -> tuple[int, int]:
    """Rows and keys of the blocks of a split, if a stream has up to `rows` rows times query heads per key head.

    The size of a block does not change a row's bits. With few rows, a smaller block does less work.
    """
    blocks = FLOAT32_BLOCKS if dtype == torch.float32 else HOPPER_BLOCKS if capability == HOPPER else BLOCKS
    most, keys = blocks[min((most for most in blocks if most >= head_dim), default=max(blocks))]
    return most if most == HOPPER_ROWS else MIN_BLOCK_ROWS if rows <= MIN_BLOCK_ROWS else most, keys


def capability(device: torch.device) -> int:
    """The compute capability of NVIDIA's GPU, such as 90; 0 without one."""
    is_amd = torch.version.hip is not None  # whose numbers mean other things
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" and not is_amd else (0, 0)
    return 10 * major + minor
