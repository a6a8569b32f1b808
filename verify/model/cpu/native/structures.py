"""The structures that cross to the library, field by field as in description.h and matrix.h. Imports no torch."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

# The linear layers of a decoder's layer.
PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = (
    "attention_norm",
    "attention_post_norm",
    "feed_forward_norm",
    "feed_forward_post_norm",
    "query_norm",
    "key_norm",
    "value_norm",
    "embedding_post_norm",
)


def each(kind: type[Any], *names: str) -> list[tuple[str, type[Any]]]:
    return [(name, kind) for name in names]


class Matrix(Structure):
    _fields_ = (("kind", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("data", c_void_p), ("scales", c_void_p))


class Norm(Structure):
    """A norm; of kind 0, none."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("kind", c_int32), ("size", c_int32))


class Linear(Structure):
    """A linear layer; without outputs, none."""

    _fields_ = (("matrix", Matrix), ("bias", c_void_p))


class Table(Structure):
    """Rows as a file stores them; without rows, none."""

    _fields_ = (("data", c_void_p), *each(c_int32, "kind", "rows", "width"))


class LayerEmbeddings(Structure):
    """Embeddings of tokens for each layer."""

    _fields_ = (("table", Table), ("projection", Linear), ("norm", Norm))


class Rotary(Structure):
    _fields_ = (("frequencies", c_void_p), ("size", c_int32), *each(c_float, "scaling", "temperature", "span"))


class Mixture(Structure):
    _fields_ = (
        ("router", Linear),
        ("bias", c_void_p),
        ("experts", POINTER(Linear)),
        ("shared_gate", Linear),
        *each(c_int32, "count", "used", "scores", "normalized", "groups", "used_groups", "summed"),
        ("scale", c_float),
        ("scales", c_void_p),
        *each(Norm, "router_norm", "norm", "post_norm", "shared_post_norm"),
    )


class Recurrence(Structure):
    """A layer that keeps a state."""

    _fields_ = (
        *each(Linear, "convolved", "gate", "beta", "step", "output", "keys", "values", "gate_down", "step_down"),
        *each(c_void_p, "taps", "bias", "decay", "step_bias", "skip"),
        ("norm", Norm),
        *each(c_int32, "kind", "window", "channels", "heads", "key_heads", "key_dim", "value_dim"),
        *each(c_int32, "decay_dim", "activation", "tiled", "normed_gated", "convolution", "state"),
        *each(c_float, "least", "most", "reach", "epsilon"),
    )


class Latent(Structure):
    _fields_ = (("query_down", Linear), ("query_norm", Norm), ("key_up", Linear), ("value_up", Linear))


class Updates(Structure):
    """How a layer changes several residuals."""

    _fields_ = (("norm", Norm), *each(c_void_p, "router", "predict", "correct", "scale"))


class Layer(Structure):
    _fields_ = (
        *each(Norm, *NORMS),
        *each(Linear, *PROJECTIONS, "query_gate", "embedding_gate", "embedding_output"),
        *each(Linear, "augment_down", "augment_up"),
        ("augment_post_norm", Norm),
        ("updates", POINTER(Updates)),
        ("mixture", POINTER(Mixture)),
        ("recurrence", POINTER(Recurrence)),
        ("latent", POINTER(Latent)),
        ("sinks", c_void_p),
        *each(c_int32, "heads", "kv_heads", "head_dim", "value_dim", "cached", "window"),
        *each(c_int32, "rotary", "rotated", "activation", "parallel"),
        *each(c_float, "scaling", "cap", "alpha", "limit", "scale", "deviations"),
    )


class Model(Structure):
    _fields_ = (
        *each(c_int32, "layers", "hidden", "rotaries"),
        *each(c_float, "epsilon", "embedding_scale", "residual_scale", "logit_scale", "logit_cap"),
        ("layer", POINTER(Layer)),
        ("rotary", POINTER(Rotary)),
        ("embedding", Matrix),
        ("head", Linear),
        ("norm", Norm),
        ("embeddings", LayerEmbeddings),
        ("expand", POINTER(Linear)),
        ("merge", POINTER(Linear)),
        ("residuals", c_int32),
    )


class LowRank(Structure):
    """An adapter's addition to a linear layer."""

    _fields_ = (("down", Matrix), ("up", Matrix))


class AdapterLayer(Structure):
    _fields_ = tuple((name, LowRank) for name in PROJECTIONS)


class Adapter(Structure):
    _fields_ = (("layer", POINTER(AdapterLayer)), ("rank", c_int32))


class Tap(Structure):
    """The hidden states that are kept."""

    _fields_ = (("count", c_int32), ("layers", c_void_p), ("states", c_void_p))


class CachedPart(Structure):
    """Keys or values of a layer in a cache."""

    _fields_ = (("data", c_void_p), ("head_stride", c_int64), ("position_stride", c_int64))


class Slot(Structure):
    _fields_ = (
        *each(c_void_p, "matrices", "keys", "writes", "decays", "inputs", "next_matrices", "next_inputs", "parents"),
        *each(c_int32, "capacity", "folded", "known"),
    )


class Stream(Structure):
    _fields_ = (
        ("parts", POINTER(CachedPart)),
        *each(c_int32, "stored", "rows", "start", "length", "kept"),
        *each(c_void_p, "tokens", "depths", "counts", "slots"),
        ("adapter", POINTER(Adapter)),
        ("states", POINTER(Slot)),
    )


# As in forward.cpp.
VERSION = 1
# In their order above, which is that of `outrider_sizes`.
ALL = [known for known in [*globals().values()] if isinstance(known, type(Structure)) and known is not Structure]
# The number of quantised kinds of weights (format.h).
FORMATS = 25


def fit(library: ctypes.CDLL) -> bool:
    """Whether a library was compiled with these functions, structures of these sizes, and these kinds of weights."""
    expected = [VERSION, *map(ctypes.sizeof, ALL), FORMATS]
    found = (c_int64 * len(expected))()
    return library.outrider_sizes(found, len(expected)) == len(expected) and list(found) == expected
