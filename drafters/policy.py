"""Whether drafting is worth its time: what it may bring, in tokens, against what it costs, in the time of tokens.

Both are measured as decoding goes on. Where it does not pay it is tried now and then: things may have changed.
"""

from __future__ import annotations

MEMORY = 0.9  # weight of earlier steps
RARELY = 16  # where it does not pay, it is tried in one step of so many


class Worth:
    """Of one kind of work, for one session."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of doing it once; a decaying mean, as the next
        self.token_seconds = 0.0  # of an emitted token, however it comes
        self._step = 0

    def pays(self, tokens: float) -> bool:
        """So many expected tokens are worth doing it once."""
        return tokens * self.token_seconds >= self.seconds

    def tried(self, tokens: float) -> bool:
        """The same, once a step, with an exception now and then."""
        self._step += 1
        return self.pays(tokens) or self._step % RARELY == 0

    def took(self, seconds: float) -> None:
        """It was done once, in that time."""
        self.seconds = ema(self.seconds, seconds)

    def emitted(self, tokens: int, seconds: float) -> None:
        """A step emitted so many tokens, in that time."""
        self.token_seconds = ema(self.token_seconds, seconds / tokens)


def ema(mean: float, value: float) -> float:
    """The decaying mean with one value more; 0 = there was none."""
    return MEMORY * mean + (1 - MEMORY) * value if mean else value
