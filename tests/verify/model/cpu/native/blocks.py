"""Random blocks of GGUF's quantised types, every bit pattern of scales, minimums and values among them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from verify.model.cpu.native.weights import Kind

STORED = {Kind.INT8: GGMLQuantizationType.Q8_0, Kind.INT4: GGMLQuantizationType.Q4_1} | {
    kind: GGMLQuantizationType[kind.name] for kind in Kind if kind > Kind.INT4
}
PAIRED = (Kind.INT4, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)  # that begin with the float16 of a scale, and that of a minimum


def random_blocks(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of weights [outputs, inputs], uint8 [outputs, bytes], as a file has them."""
    generator: Any = np.random.default_rng(seed)
    per_block, size = GGML_QUANT_SIZES[STORED[kind]]
    shape = (outputs, inputs // per_block)
    blocks = generator.integers(0, 256, (*shape, size), dtype=np.uint8)
    for place in (0, 2) if kind in PAIRED else (208,) if kind == Kind.Q6_K else (0,):
        scales = (generator.standard_normal(shape) * 0.01).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)  # type: ignore[no-any-return]
