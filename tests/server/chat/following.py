"""Texts that follow a grammar, byte by byte."""

from llguidance import LLMatcher, LLTokenizer

BYTES = LLTokenizer("byte")


def matcher_of(grammar: str | None) -> LLMatcher:
    """A matcher of a valid grammar, at its beginning."""
    matcher = LLMatcher(BYTES, grammar or "", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str | None, text: str) -> bool:
    """Whether `text` is a complete answer under the grammar."""
    matcher = matcher_of(grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
