"""A decoder in plain values. What is computed with them, the kernels of a device decide.

Weights are named as in GGUF files. Which layers have norms and biases, the weights say that are there.

Promises that sizes fit each other, whatever a file says, because what computes with them checks no bounds: a value that no
decoder can have raises ValueError.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Any

# The library's integers have 32 bits.
LARGEST = 2**31 - 1


def check(fits: bool, words: str) -> None:
    """Raises ValueError unless the sizes fit."""
    if not fits:
        raise ValueError(f"its sizes do not fit each other: {words}")


def check_sizes(owner: Any, least: int, *names: str) -> None:
    """Raises ValueError unless these fields are integers from `least` to LARGEST."""
    for name in names:
        value = getattr(owner, name)
        check(isinstance(value, Integral) and least <= int(value) <= LARGEST, f"{name.replace('_', ' ')} {str(value)[:20]}")


class Norm(Enum):
    RMS = 1
    LAYER = 2


class Activation(Enum):
    """The function of a feed-forward part, or of a recurrent layer's gate."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3
    SQUARED_RELU = 4
    CLAMPED_SILU = 5
    LOGISTIC = 6


class Scores(Enum):
    """How the logits of a router become scores of experts: softmax of all, sigmoid, or softmax of those that are chosen."""

    SOFTMAX = 0
    SIGMOID = 1
    CHOSEN_SOFTMAX = 2


class State(Enum):
    """The state of a recurrent layer: the last inputs of a convolution, and, except for CONVOLUTION, a matrix per head."""

    DELTA_RULE = 0  # Yang et al., Gated Delta Networks; Kimi Team, Kimi Linear
    STATE_SPACE = 1  # Dao and Gu, Mamba 2
    CONVOLUTION = 2


@dataclass(frozen=True)
class Rotary:
    """A table of rotary angles (Su et al., RoFormer, equation 34)."""

    size: int  # dimensions of a head that are rotated, the first ones; with latent attention, the last ones
    base: float
    # How frequencies are scaled for long texts, by the names of transformers; `divisors` of a file divide the frequencies.
    scaling: Mapping[str, Any] = field(default_factory=dict)
    context_tokens: int = 0  # the longest text that the model supports

    def __post_init__(self) -> None:
        check_sizes(self, 1, "size")


@dataclass(frozen=True)
class Mixture:
    """Experts, of which each row uses some."""

    experts: int
    used: int
    scores: Scores = Scores.SOFTMAX
    normalizes: bool = False  # the weights of a row's experts to a sum of 1
    scale: float = 1.0  # of weights
    groups: int = 1  # experts are chosen in the groups with the largest sums of scores
    used_groups: int = 1
    summed: int = 2  # the largest scores of a group, of which its sum is

    def __post_init__(self) -> None:
        check_sizes(self, 1, "experts", "used", "groups", "used_groups", "summed")
        check(self.used <= self.experts, f"{self.used} of {self.experts} experts")
        if self.groups > 1:
            size, words = self.experts // self.groups, f"{self.used_groups} of {self.groups} groups of {self.experts} experts"
            check(self.experts % self.groups == 0 and self.used_groups <= self.groups, words)
            check(self.used <= self.used_groups * size and self.summed <= size, words)


@dataclass(frozen=True)
class Recurrence:
    """A mixer that keeps a state."""

    kind: State
    window: int  # inputs before a row that its convolution reads
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decay_dim: int = 1  # 1 = a head's matrix has one decay; key_dim = each of its rows has its own
    activation: Activation = Activation.SILU  # of the gate
    is_tiled: bool = False  # head h reads the key head h % key_heads, and not h / (heads / key_heads)
    gates_first: bool = True  # outputs of a state space are multiplied by the gate before they are normed
    steps: tuple[float, float] = (0.0, math.inf)  # the smallest and the largest
    reach: float = 1.0  # the most that the delta rule corrects what a key reads by
    epsilon: float | None = None  # of its norm; None = as elsewhere

    def __post_init__(self) -> None:
        check_sizes(self, 0, "window")
        if self.kind is not State.CONVOLUTION:
            check_sizes(self, 1, "heads", "key_heads", "key_dim", "value_dim")
            check(self.heads % self.key_heads == 0, f"{self.heads} heads of a state and {self.key_heads} of its keys")


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are products of one latent.

    A layer attends to latents as they are: its head is a latent and the part of a key that is rotated, of which only the latent
    is a value. Queries are multiplied by the weights that would make keys of latents, outputs by those that would make values.
    """

    rank: int  # the width of a latent
    key_dim: int  # of a head, without what is rotated
    value_dim: int
    query_rank: int = 0  # of what queries are products of; 0 = the residual

    def __post_init__(self) -> None:
        check_sizes(self, 1, "rank", "key_dim", "value_dim")
        check_sizes(self, 0, "query_rank")


@dataclass(frozen=True)
class Layer:
    """A layer of attention, of recurrence, or of both, and a feed-forward part; each may be absent."""

    heads: int = 0  # 0 = no attention
    kv_heads: int = 0
    head_dim: int = 0
    scaling: float = 1.0  # of scores
    window: int | None = None  # positions that a row attends to, its own included; None = all
    rotary: int | None = None  # index of the table; None = positions are not encoded
    cap: float | None = None  # soft limit of scores
    is_gated: bool = False  # outputs are multiplied by the sigmoid of a gate, which weights have beside each query head
    latent: Latent | None = None
    norms_values: bool = False  # of each head, without weights
    # A gate is zero unless it exceeds the mean of a row's gates by this many standard deviations; -inf = all gates stay.
    deviations: float = -math.inf
    source: int | None = None  # earlier layer whose keys and values it reads; None = it has its own
    recurrence: Recurrence | None = None
    feeds: bool = True  # whether there is a feed-forward part

    def __post_init__(self) -> None:
        check_sizes(self, 0, "heads")
        if self.heads:
            check_sizes(self, 1, "kv_heads", "head_dim")
            check(self.heads % self.kv_heads == 0, f"{self.heads} heads and {self.kv_heads} of keys")
        if self.window is not None:
            check_sizes(self, 1, "window")

    @property
    def is_cached(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.heads > 0 and self.source is None


@dataclass(frozen=True)
class Architecture:
    name: str  # as GGUF files have it
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    rotaries: tuple[Rotary, ...]
    context_tokens: int  # the longest text that the model supports
    epsilon: float
    norm: Norm = Norm.RMS
    activation: Activation = Activation.SILU
    mixture: Mixture | None = None  # of layers that have a router
    clamp: tuple[float, float] = (1.702, 7.0)  # factor and limit of CLAMPED_SILU
    is_parallel: bool = False  # feed-forward parts read the residual before attention
    embedding_scale: float = 1.0
    embedding_width: int = 0  # of the embeddings of tokens for each layer; 0 = there are none
    residuals: int = 0  # that layers predict and correct; 0 = one, which they add to
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None  # soft limit
    # How the weights are stored.
    has_pairs: bool = False  # values of queries and keys that are rotated together lie side by side, not half a head apart
    norms_less_one: bool = False
    decays_as_logarithms: bool = False
    # What outputs of linear layers are multiplied by, by the library's names.
    multipliers: Mapping[str, float] = field(default_factory=dict)
    turns_experts: bool = False  # a checkpoint's fused weights are [experts, inputs, outputs], and gate and up take turns
    norms_after_attention: bool = True  # else the norm before the feed-forward part is named so

    def __post_init__(self) -> None:
        check_sizes(self, 1, "hidden", "vocabulary", "context_tokens")
        check_sizes(self, 0, "embedding_width", "residuals")
        check(len(self.layers) > 0, "no layers")
        for number, layer in enumerate(self.layers):
            if layer.rotary is not None:
                size = self.rotaries[layer.rotary].size
                check(size <= layer.head_dim, f"heads of {layer.head_dim}, of which {size} are rotated")
            if layer.source is not None:
                check(0 <= layer.source < number, f"layer {number} reads layer {layer.source}")
                source = self.layers[layer.source]
                check(source.is_cached, f"layer {number} reads layer {layer.source}")
                sizes = [(each.kv_heads, each.head_dim) for each in (layer, source)]
                check(sizes[0] == sizes[1], f"layer {number} reads keys of layer {layer.source}")


def source_of(kinds: Sequence[Any], first_shared: int) -> int | None:
    """The layer whose keys and values the last of these layers reads: of those before `first_shared`, the last of its kind."""
    if len(kinds) <= first_shared:
        return None
    return max(number for number, kind in enumerate(kinds[:first_shared]) if kind == kinds[-1])
