"""The numbers of rows for which a GPU's forwards are captured."""

# A root and 71 nodes: the number to which rows are padded where a row's bits depend on how many there are.
RANGE_ROWS = 72
# 72 and 136: a root and 64 or 128 nodes, and more up to a multiple of the tensor cores' tiles.
ROWS = (1, 2, 4, 8, 16, 32, 64, RANGE_ROWS, 128, 136, 256)
