"""The acceptance rule of each request (`outrider.verify.acceptance`), where the server may choose it.

A request with a seed, greedy decoding, a grammar or several choices is always `keyed` under `auto`: its answer can be compared
with another one. Elsewhere only the distribution of the answer can be observed, which both rules preserve, so the rule that
has emitted more tokens per second is used. Tables gain nothing from `rejection`, so drafters without a draft model are `keyed`.
"""

from __future__ import annotations

from typing import Literal

from outrider.drafters.options import NEED_A_MODEL, DrafterName
from outrider.drafters.policy import Probe
from outrider.server.engine.messages import Request, TokenEvent
from outrider.server.settings import Settings
from outrider.verify.sampling_params import SamplingParams

Rule = Literal["keyed", "rejection"]
TRIAL_TOKENS = 512  # of each rule, before their speeds are compared
MEMORY_TOKENS = 16_384  # later tokens replace earlier measurements at this rate


class Speed:
    """The tokens and seconds of one drafter's steps under one rule."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        return self.tokens / max(self.seconds, 1e-9)

    def record(self, tokens: int, seconds: float) -> None:
        """Adds one step."""
        kept = 1 - tokens / MEMORY_TOKENS
        self.tokens, self.seconds = kept * self.tokens + tokens, kept * self.seconds + seconds


class AcceptanceRules:
    """Chooses rules, and measures what they bring."""

    def __init__(self, settings: Settings) -> None:
        self._default = settings.speculation.rule
        self._drafter = settings.speculation.drafter
        sampling: tuple[DrafterName, ...] = (*NEED_A_MODEL, "fusion") if settings.draft_model.path is not None else ()
        self._speeds: dict[DrafterName, dict[Rule, Speed]] = {
            name: {"keyed": Speed(), "rejection": Speed()} for name in sampling
        }
        self._probe = Probe()

    def choose(
        self, asked: Rule | Literal["auto"] | None, drafter: DrafterName | None, params: SamplingParams, comparable: bool
    ) -> Rule:
        """The rule of a request. `comparable`: it has a seed, a grammar or several choices."""
        rule = asked or self._default
        if rule != "auto":
            return rule
        speeds = self._speeds.get(drafter or self._drafter)
        if speeds is None or comparable or params.greedy:
            return "keyed"
        slower, faster = sorted(speeds, key=lambda name: speeds[name].tokens_per_second)
        fewer = min(speeds, key=lambda name: speeds[name].tokens)
        if speeds[fewer].tokens < TRIAL_TOKENS:
            return fewer
        return slower if self._probe.due() else faster

    def record(self, request: Request, event: TokenEvent) -> None:
        """Records one step of a request that samples from the whole vocabulary."""
        speeds, step = self._speeds.get(request.drafter or self._drafter), event.step
        if speeds is None or step is None or request.params.greedy or request.grammar or request.reasoning:
            return
        seconds = step.draft_seconds + step.verify_seconds + step.commit_seconds
        speeds[request.params.rule].record(len(event.tokens), seconds)
