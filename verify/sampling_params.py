"""Sampling parameters of a request. Imports no torch: the front end uses this module, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from outrider.drafters.noise import prompt_seed

# The largest probability is 1 to float32 precision at any smaller temperature, and logits over it may overflow.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0  # greedy below MIN_TEMPERATURE
    top_p: float = 1.0  # keep the smallest set of top tokens whose probabilities sum to at least this
    top_k: int = 0  # keep the k most likely tokens; 0 = all
    min_p: float = 0.0  # keep tokens with at least this fraction of the top token's probability
    seed: int = 0
    rule: Literal["keyed", "rejection"] = "keyed"  # acceptance rule, see outrider.verify.sampling.acceptance
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that occur in the answer
    frequency_penalty: float = 0.0  # subtracted once per occurrence
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or answer, multiplies negative ones
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id to the value added to its logit
    min_tokens: int = 0  # stop tokens are masked until the answer has this length
    ignore_eos: bool = False  # treat stop tokens as ordinary tokens
    logprobs: int | None = None  # report log-probabilities of each token and of this many top tokens

    def for_prompt(self, tokens: int) -> SamplingParams:
        """The parameters with the seed for a prompt of this many tokens."""
        return replace(self, seed=prompt_seed(self.seed, tokens))

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are excluded."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts(self) -> bool:
        """Whether the model's logits are modified before sampling."""
        return bool(self.penalizes or self.logit_bias or self.min_tokens)


@dataclass(frozen=True)
class ReasoningLimit:
    """The longest reasoning of an answer, in tokens, and the tokens around the reasoning."""

    max_tokens: int
    closing: int  # token id
    opening: int | None = None  # token id; the answer reasons if it begins with this token. None = the prompt ends with it
