"""The draft of one step, as chunks of chats and completions contain it."""

from __future__ import annotations

from typing import Any

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import StepReport, StepTrace


def trace_body(vocabulary: Vocabulary, step: StepReport, trace: StepTrace) -> dict[str, Any]:
    """The `trace` object. Its size is bounded by the draft, which has at most MAX_NODES nodes."""
    bonus = trace.bonus
    return {
        "draft": {
            "tokens": trace.tokens,
            "texts": [vocabulary.text_of(token) for token in trace.tokens],
            "parents": trace.parents,
            "probabilities": [round(value, 4) for value in trace.probability],
            "sources": trace.sources,
        },
        "accepted": trace.accepted,
        "bonus": None if bonus is None else {"token": bonus, "text": vocabulary.text_of(bonus)},
        "proposed": trace.proposed,
        "expected_tokens": None if trace.expected is None else round(trace.expected, 3),
        "gain": round(trace.gain, 3),
        "draft_ms": milliseconds(step.draft_seconds),
        "verify_ms": milliseconds(step.verify_seconds),
        "commit_ms": milliseconds(step.commit_seconds),
    }


def milliseconds(seconds: float) -> float:
    """The time in milliseconds, to the microsecond."""
    return round(1e3 * seconds, 3)
