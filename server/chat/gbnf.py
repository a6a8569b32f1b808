"""llama.cpp's GBNF: how it is recognised, and its conversion to llguidance's dialect of Lark."""

from __future__ import annotations

from llguidance import gbnf_to_lark

# At worst, the conversion takes quadratic time.
MAX_CHARACTERS = 1 << 13


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in llama.cpp's GBNF rather than in Lark: a rule's name is followed by `::=`."""
    return any(
        line.partition("::=")[0].strip().replace("-", "_").isidentifier() for line in grammar.split("\n") if "::=" in line
    )


def to_lark(grammar: str) -> str:
    """The grammar in llguidance's dialect of Lark. Raises ValueError if it is invalid GBNF."""
    if not is_gbnf(grammar):
        return grammar
    if len(grammar) > MAX_CHARACTERS:
        raise ValueError(f"in GBNF, it may have at most {MAX_CHARACTERS} characters; shorten it or write it in Lark")
    try:
        rules = gbnf_to_lark.GrammarParser().parse(grammar)
        gbnf_to_lark.resolve(rules)
    except RecursionError:
        raise ValueError("it is nested too deep; flatten it") from None
    except Exception as error:  # the converter raises no narrower type
        raise ValueError(f"it is not valid GBNF: {error}") from None
    return "\n".join(str(rule) for rule in rules.values())
