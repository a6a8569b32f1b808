"""The numbers of rows for which a GPU's forwards are captured, and the blocks of text in which rows are summed."""

# 72 and 136: a root and 71 or 135 nodes, up to a multiple of the tensor cores' tiles.
ROWS = (1, 2, 4, 8, 16, 32, 64, 72, 128, 136, 256)
# Torch.compile makes a kernel of its own for one row, whose bits may differ. So where rows are to be invariant, one is padded.
INVARIANT_ROWS = ROWS[1:]
# The positions of a block of text. Where rows are invariant, the rows of a step lie in one block.
BLOCK = 64


def depth_left(length: int) -> int:
    """Positions of the block that follow the root, after `length` committed tokens."""
    return BLOCK - 1 - length % BLOCK
