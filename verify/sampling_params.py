"""How a request wants its tokens chosen. Imports no torch, so that the front end can make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SamplingParams:
    """How a request wants its tokens chosen."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with at least this mass
    top_k: int = 0  # keep this many likeliest tokens; 0 = all
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest one's probability
    seed: int = 0
    rule: Literal["keyed", "rejection"] = "keyed"
    presence_penalty: float = 0.0  # taken from the logits of tokens that the answer has
    frequency_penalty: float = 0.0  # the same, once for each time
    repetition_penalty: float = 1.0  # divides the logits of tokens that prompt or answer have
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    min_tokens: int = 0  # no stop token before so many
    ignore_eos: bool = False  # stop tokens are tokens like others
    logprobs: int | None = None  # report each token's log-probability and those of so many likeliest ones

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts(self) -> bool:
        """The logits are not taken as the model gives them."""
        return bool(self.penalizes or self.logit_bias or self.min_tokens)
