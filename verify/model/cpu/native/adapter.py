"""Packs an adapter for the library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np

from outrider.verify.model.adapter import Adapter, AdapterWeights, LowRank, UnfitAdapter
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.decoder import Decoder, ordered
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.weights import Kind, Weights


@dataclass(frozen=True, eq=False)
class NativeAdapter(Adapter):
    """An adapter as the library takes it, and what this refers to."""

    description: structures.Adapter
    kept: list[object]


def packed_adapter(adapter: AdapterWeights, decoder: Decoder, engine: Engine) -> NativeAdapter:
    """The adapter of a model. Raises UnfitAdapter if its shapes do not fit the model."""
    count = decoder.description.layers
    layers, kept = (structures.AdapterLayer * count)(), list[object]()
    for (layer, name), part in adapter.parts.items():
        shape = (len(part.up), part.down.shape[1])
        expected = decoder.shape_of(layer, name) if layer < count else None
        if shape != expected or part.up.shape[1] != len(part.down):
            model = "no such layer" if expected is None else " x ".join(map(str, expected))
            raise UnfitAdapter(
                f"is for another model: it changes {name} of layer {layer} by {shape[0]} x {shape[1]},"
                f" and the model has {model}"
            )
        weights = packed_pair(replace(part, up=ordered(decoder.architecture, layer, name, part.up)), engine)
        kept.extend(weights)
        setattr(layers[layer], name, structures.LowRank(*(each.matrix for each in weights)))
    rank = max(each.down.shape[0] for each in adapter.parts.values())
    description = structures.Adapter(ctypes.cast(layers, ctypes.POINTER(structures.AdapterLayer)), rank + rank % 2)
    return NativeAdapter(adapter.digest, description, [layers, *kept])


def packed_pair(part: LowRank, engine: Engine) -> tuple[Weights, Weights]:
    """Both factors. An odd rank is padded with zeros, because inputs are even."""
    odd = len(part.down) % 2
    pair = np.pad(part.down, ((0, odd), (0, 0))), np.pad(part.up, ((0, 0), (0, odd)))
    down, up = (Weights.of(engine, Kind.FLOAT32, each) for each in pair)
    return down, up
