"""Random blocks of GGUF's quantised types, every bit pattern of integer scales and values among them."""

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from numpy.typing import NDArray

from outrider.verify.model.cpu.native.weights import KINDS, Kind
from outrider.verify.model.stored import Stored, StoredType, Zeroed

SIZES: dict[StoredType, tuple[int, int]] = {**GGML_QUANT_SIZES, Zeroed.ZERO4: (32, 19), Zeroed.ZERO8: (32, 35)}

STORED: dict[Kind, StoredType] = {kind: type for type, kind in KINDS.items()}
# Where blocks have float16: of scales, and of minimums. Elsewhere, they begin with one.
FACTORS: dict[Kind, tuple[int, ...]] = {kind: (0, 2) for kind in (Kind.INT4, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)}
FACTORS |= {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,)}
DEVIATION = 0.05  # of the weights


def random_blocks(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of weights [outputs, inputs], uint8 [outputs, bytes], as a file has them."""
    generator: Any = np.random.default_rng(seed)
    per_block, size = SIZES[STORED[kind]]
    blocks = generator.integers(0, 256, (outputs, inputs // per_block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:  # scales are powers of two, 2 ** (byte - 127)
        blocks[..., 0] = generator.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(outputs, -1)  # type: ignore[no-any-return]
    if kind == Kind.NVFP4:  # float8_e4m3 scales without a sign
        blocks[..., :4] = generator.integers(1, 30, (*blocks.shape[:2], 4))
        return blocks.reshape(outputs, -1)  # type: ignore[no-any-return]
    places = FACTORS.get(kind, (0,))
    factors = generator.standard_normal((len(places), *blocks.shape[:2], 1))

    def scaled(factor: float) -> Any:
        for place, values in zip(places, factors, strict=True):
            halves = (values * factor).astype(np.float16)
            if kind == Kind.IQ1_M:  # four bits of it are above the scales in each of the last four integers
                scales = blocks[..., 48:].view(np.uint16)
                scales[...] = (scales & 0xFFF) | (halves.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)) << 12
            else:
                blocks[..., place : place + 2] = halves.view(np.uint8)
        return blocks.reshape(outputs, -1)

    deviation = dequantized(kind, scaled(1)).std()
    return scaled(DEVIATION / deviation)  # type: ignore[no-any-return]


def dequantized(kind: Kind, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights of rows of blocks, float32 [outputs, inputs]."""
    per_block, size = SIZES[STORED[kind]]
    return Stored(blocks, STORED[kind], (len(blocks), blocks.shape[1] // size * per_block)).floats()
