"""The frequencies of rotary tables, and how they are scaled for texts longer than a model was first trained for."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.architecture.description import Rotary

# The scalings that are known, by transformers' names.
SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def is_known(rotary: Rotary) -> bool:
    return rotary.scaling.get("rope_type", "default") in SCALINGS


def frequencies(rotary: Rotary, tokens: int) -> tuple[NDArray[np.float32], float]:
    """The frequencies, [size / 2], and the scaling of cosines and sines, for texts of up to `tokens`. Requires `is_known`.

    The dynamic and longrope scalings choose them by a text's length. They are those of a full context, so that a token's keys
    do not depend on what follows it.
    """
    scaling, size, base = rotary.scaling, rotary.size, rotary.base
    kind, exponents = scaling.get("rope_type", "default"), np.arange(0, size, 2) / size
    factor, attention = float(scaling.get("factor") or 1.0), 1.0
    if kind == "dynamic":
        longest = max(tokens, rotary.context_tokens)
        stretch = factor * longest / rotary.context_tokens - (factor - 1)
        base *= stretch ** (size / (size - 2))
    found = base**-exponents
    if kind == "linear":
        found = found / factor
    elif kind == "yarn":
        found, attention = yarn(rotary, found)
    elif kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        found = found / np.array(scaling["long_factor" if tokens > original else "short_factor"], float)
        attention = longrope_attention(rotary)
    elif kind == "llama3":
        found = llama3(scaling, found)
    elif kind == "proportional":  # only the first ones rotate
        rotated = int(scaling.get("partial_rotary_factor", 1.0) * size // 2)
        found = np.where(np.arange(size // 2) < rotated, found / factor, 0.0)
    if "divisors" in scaling:
        found = found / np.array(scaling["divisors"], float)
    return found.astype(np.float32), attention


def yarn(rotary: Rotary, plain: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Peng et al., YaRN: Efficient Context Window Extension, equations 17 to 22."""
    scaling, size = rotary.scaling, rotary.size
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rotary.context_tokens / original

    def dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))

    low, high = dimension(scaling.get("beta_fast") or 32.0), dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), yarn_attention(scaling, factor)


def yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    one, all_dimensions = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(one, factor) / magnitude(all_dimensions, factor) if one and all_dimensions else magnitude(1.0, factor)


def magnitude(scale: float, factor: float) -> float:
    """The growth of the scores in a text that is `factor` times as long as in training."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def latent_scaling(width: int, scaling: Mapping[str, Any]) -> float:
    """The scaling of scores of latent attention, whose heads have this width."""
    scale, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
    return float(width**-0.5 * (magnitude(scale, factor) ** 2 if scale and factor else 1.0))


def longrope_attention(rotary: Rotary) -> float:
    """Ding et al., LongRoPE; the scaling is that of Phi-3."""
    scaling = rotary.scaling
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rotary.context_tokens / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def llama3(scaling: Mapping[str, Any], plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long waves are stretched, short ones are kept, and those between are interpolated."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi / plain
    kept = np.clip((original / waves - low) / (high - low), 0, 1)
    found: NDArray[np.float64] = plain * kept + plain / factor * (1 - kept)
    return found
