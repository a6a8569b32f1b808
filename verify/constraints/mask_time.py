"""The processor time of a client's masks, of all its answers together.

Promises that the masks of one client's grammars take at most a share of the time, however many answers it has: the masks of
draft nodes are left out first, and slow masks of roots, which cannot be, end their answers. Knows nothing about grammars.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

# The masks of a step, and the share of the passing time by which what a client may spend grows again. An ordinary mask takes
# less than a millisecond.
MASKS_SECONDS, MASKS_SHARE = 0.02, 1 / 3
# A slow mask of a root; and what all of them may take together, which grows likewise.
SLOW_SECONDS = 0.005
ROOTS_SECONDS, ROOTS_SHARE = 0.5, 0.1
# A grammar whose masks ended an answer is refused for REFUSED_SECONDS. The MAX_REFUSED latest ones are remembered.
REFUSED_SECONDS, MAX_REFUSED = 300.0, 64


class Bucket:
    """An amount that is spent, and grows again with the time up to a bound."""

    def __init__(self, bound: float, share: float, clock: Callable[[], float]) -> None:
        self._bound, self._share, self._clock = bound, share, clock
        self._left, self._at = bound, clock()

    @property
    def left(self) -> float:
        """The seconds that are left; negative if more were spent."""
        now = self._clock()
        self._left, self._at = min(self._bound, self._left + self._share * (now - self._at)), now
        return self._left

    def spend(self, amount: float) -> None:
        self._left = self.left - amount


class MaskTime:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._masks = Bucket(MASKS_SECONDS, MASKS_SHARE, clock)
        self._roots = Bucket(ROOTS_SECONDS, ROOTS_SHARE, clock)
        self._refused: OrderedDict[str, float] = OrderedDict()  # the clock's time of the refusal, by grammar

    @property
    def left(self) -> float:
        """The seconds that the masks of a step may take."""
        return self._masks.left

    def spend(self, seconds: float) -> None:
        self._masks.spend(seconds)

    def allows_root(self, seconds: float) -> bool:
        """Whether an answer may go on after a mask of its root took this time."""
        if seconds <= SLOW_SECONDS:
            return True
        self._roots.spend(seconds)
        return self._roots.left > 0

    def refuse(self, grammar: str) -> None:
        self._refused.pop(grammar, None)
        self._refused[grammar] = self._clock()
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def refuses(self, grammar: str) -> bool:
        """Whether the grammar has ended an answer lately."""
        return self._clock() - self._refused.get(grammar, -REFUSED_SECONDS) < REFUSED_SECONDS
