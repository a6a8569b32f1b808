"""Random blocks of GGUF's quantised types, every bit pattern of integer scales and values among them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider.verify.model.cpu.native.weights import Kind

STORED = {Kind.INT8: GGMLQuantizationType.Q8_0, Kind.INT4: GGMLQuantizationType.Q4_1} | {
    kind: GGMLQuantizationType[kind.name] for kind in Kind if kind > Kind.INT4
}
PAIRED = (Kind.INT4, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)  # blocks begin with two float16: of scales, and of minimums
DEVIATION = 0.05  # of the weights


def random_blocks(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of weights [outputs, inputs], uint8 [outputs, bytes], as a file has them."""
    generator: Any = np.random.default_rng(seed)
    per_block, size = GGML_QUANT_SIZES[STORED[kind]]
    blocks = generator.integers(0, 256, (outputs, inputs // per_block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:  # scales are powers of two, 2 ** (byte - 127)
        blocks[..., 0] = generator.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(outputs, -1)  # type: ignore[no-any-return]
    places = (0, 2) if kind in PAIRED else (208,) if kind == Kind.Q6_K else (0,)
    factors = generator.standard_normal((len(places), *blocks.shape[:2], 1))

    def scaled(factor: float) -> Any:
        for place, values in zip(places, factors, strict=True):
            blocks[..., place : place + 2] = (values * factor).astype(np.float16).view(np.uint8)
        return blocks.reshape(outputs, -1)

    deviation = quants.dequantize(scaled(1), STORED[kind]).std()
    return scaled(DEVIATION / deviation)  # type: ignore[no-any-return]
