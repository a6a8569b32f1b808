"""llama.cpp's GBNF: how it is recognised, and its conversion to llguidance's dialect of Lark."""

from collections.abc import Mapping

from outrider.server.chat.gbnf.lexemes import LexemeCutter
from outrider.server.chat.gbnf.parser import Parser, is_gbnf
from outrider.server.chat.gbnf.rules import Rules
from outrider.server.chat.gbnf.writer import Writer

__all__ = ["is_gbnf", "to_lark"]


def to_lark(grammar: str, tokens: Mapping[str, int]) -> str:
    """The grammar in llguidance's dialect of Lark. Raises ValueError if it is invalid GBNF.

    `tokens`: ids by text of the model's tokens that a grammar may name.
    """
    if not is_gbnf(grammar):
        return grammar
    rules = Rules(Parser(grammar, tokens).parse())
    LexemeCutter(rules).cut()
    return Writer(rules).write()
