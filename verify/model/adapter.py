"""LoRA adapters as peft saves them: low-rank additions to the linear layers of a model.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, equation 3: h = W x + (alpha / r) B A x.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.checkpoint import DEFAULT_REVISION
from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.hub import hub_errors, model_file
from outrider.verify.model.tensors import read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"\blayers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.lora_([AB])\.weight$")
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output", "gate": "gate", "up": "up", "down": "down"}
# What peft may add to a plain adapter, with the values that add nothing.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None,),
}


class UnfitAdapter(Exception):
    """An adapter of another model; the message continues a sentence."""


@dataclass(frozen=True)
class LowRank:
    """An adapter's addition to one linear layer: `up @ (down @ x)`."""

    down: NDArray[np.float32]  # float32 [rank, inputs]
    up: NDArray[np.float32]  # float32 [outputs, rank], scaled


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter's additions by layer and projection."""

    parts: Mapping[tuple[int, str], LowRank]
    digest: str  # of its files


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that a backend holds."""

    digest: str


def read_adapter(path: str) -> AdapterWeights:
    """The adapter in a folder or of a hub id. Raises ModelError."""
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise ModelError(f"There is no folder {path!r}; give an adapter's folder, or the id of one on the Hugging Face hub.")
    if Path(path).is_dir() and (absent := [name for name in (CONFIG, WEIGHTS) if not (Path(path) / name).is_file()]):
        raise ModelError(f"No adapter at {path!r}: the folder has no {absent[0]}.")
    try:
        files = [model_file(path, name, DEFAULT_REVISION) for name in (CONFIG, WEIGHTS)]
        config_bytes, data = (each.read_bytes() for each in files)
        config = json.loads(config_bytes)
    except hub_errors() as error:
        raise ModelError(f"No adapter at {path!r}: {first_sentence(error)}") from None
    tensors = read_safetensors(path, files[1:])
    if tensors is None:
        raise ModelError(f"The adapter at {path!r} has weights that are no floats of 32 or 16 bits; save it so.")
    for name, plain in PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise ModelError(f"The adapter at {path!r} has {name}: {config[name]!r}, which is not supported; merge it instead.")
    found: dict[tuple[int, str], dict[str, NDArray[np.float32]]] = {}
    for name, tensor in sorted(tensors.items()):
        match = NAME.search(name)
        if match is None or match[2] not in PROJECTIONS:
            raise ModelError(f"The adapter at {path!r} changes {name!r}, which is not supported; merge it instead.")
        found.setdefault((int(match[1]), PROJECTIONS[match[2]]), {})[match[3]] = tensor.floats()
    if not found or any(len(parts) < 2 for parts in found.values()):
        raise ModelError(f"The adapter at {path!r} is incomplete; save it again.")
    parts = {place: scaled(config, each["A"], each["B"]) for place, each in found.items()}
    return AdapterWeights(parts, hashlib.blake2b(config_bytes + data, digest_size=12).hexdigest())


def scaled(config: Mapping[str, Any], down: NDArray[np.float32], up: NDArray[np.float32]) -> LowRank:
    """The two factors, with the adapter's scale in the second."""
    rank = config.get("r", len(down))
    scale = config.get("lora_alpha", rank) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down, up * np.float32(scale))
