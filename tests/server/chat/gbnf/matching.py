"""How the tests read a grammar: with llguidance as the server does, and with a matcher of their own."""

from __future__ import annotations

from collections.abc import Mapping

from llguidance import LLMatcher, LLTokenizer

from outrider.server.chat.grammar_builder import build
from outrider.server.chat.grammar_job import GrammarJob, Structure
from outrider.verify.constraints.limits import LIMITS

BYTES = LLTokenizer("byte")


class Follower:
    """A grammar that llguidance follows."""

    def __init__(self, grammar: str, special: Mapping[str, int] | None = None) -> None:
        """Raises ValueError if there is no such grammar."""
        job = GrammarJob(64, 256, structure=Structure("grammar", grammar), special=special or {})
        self.lark = build(job, lambda grammar: "").text
        self._matcher = LLMatcher(BYTES, self.lark, log_level=0, limits=LIMITS)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def allows(self, text: str, complete: bool = True) -> bool:
        """Whether it allows the text, as the whole answer or as its beginning."""
        matcher = self._matcher.deep_copy()
        return all(matcher.consume_token(byte) for byte in text.encode()) and (matcher.is_accepting() or not complete)
