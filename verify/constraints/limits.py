"""llguidance's work limits and error texts, for worker and grammar validator. Imports neither torch nor transformers."""

from llguidance import LLParserLimits

# Work limits bound the time: at most about 0.1 s to compile a grammar or to compute a mask.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,  # they contain the parser's state, and with it the grammar and the answer
)


def first_line(message: str) -> str:
    """The first line of an llguidance error; of one about a regex, what is wrong with it, too."""
    first, *rest = message.split("\n")
    if first.endswith(":"):
        first += next((line.removeprefix("error:") for line in rest if line.startswith("error:")), "")
    return " ".join(first.split())[:300].removesuffix(":")
