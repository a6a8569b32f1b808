"""Decodes one answer alone. Emits the tokens of plain decoding, whatever the drafter proposes."""

from dataclasses import dataclass

from outrider.drafters.interface import Drafter, Ints
from outrider.drafters.sequence import Finish
from outrider.verify.constraints.reasoning import Constraint
from outrider.verify.round import run_round
from outrider.verify.stream import DecodeOptions, Step, Stream
from outrider.verify.verifier import Verifier


@dataclass(frozen=True)
class Decoded:
    tokens: list[int]
    finish: Finish
    steps: list[Step]


def step(stream: Stream) -> Step:
    """A round of one request alone. Raises what ends the request."""
    outcome = run_round([stream])[0]
    assert outcome is not None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def decode(
    verifier: Verifier, drafter: Drafter, prompt: Ints, options: DecodeOptions, grammar: Constraint | None = None
) -> Decoded:
    return finish(Stream(verifier, drafter, prompt, options, grammar))


def finish(stream: Stream) -> Decoded:
    tokens: list[int] = []
    steps: list[Step] = []
    try:
        while True:
            taken = step(stream)
            tokens.extend(taken.tokens)
            if taken.tree is not None:
                steps.append(taken)
            if taken.finish is not None:
                return Decoded(tokens, taken.finish, steps)
    finally:
        stream.close()
