"""Token usage of one answer, in the formats of OpenAI's endpoints."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from outrider.drafters.sequence import Finish
from outrider.server.engine.messages import TokenEvent


@dataclass
class Usage:
    """Tokens and steps so far, over all prompts and choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were cached
    completion_tokens: int = 0
    steps: int = 0
    finishes: list[Finish] = field(default_factory=list)  # of the choices that have ended
    drafted: Counter[str] = field(default_factory=Counter)  # draft nodes by drafter
    accepted: Counter[str] = field(default_factory=Counter)

    def record_event(self, event: TokenEvent) -> None:
        """Adds the tokens of an event, and the step that generated them."""
        self.completion_tokens += len(event.tokens)
        if event.finish is not None:
            self.finishes.append(event.finish)
        if event.step is not None:
            self.steps += 1
            self.drafted.update(event.step.drafted)
            self.accepted.update(event.step.accepted)

    def completion_body(self, reasoning_tokens: int = 0) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted["prediction"],
                "rejected_prediction_tokens": self.drafted["prediction"] - self.accepted["prediction"],
            },
        }

    def response_body(self, reasoning_tokens: int = 0) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def speculation_body(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "mean_tokens_per_step": round(self.completion_tokens / max(1, self.steps), 4),
            "drafted_tokens": dict(self.drafted),
            "accepted_tokens": dict(self.accepted),
        }
