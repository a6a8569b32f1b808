"""A toy language model for tests of model-based drafters: the next token depends only on the last one."""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints, Sampling
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.sequence import Sequence

T = TypeVar("T")


class ToyModel:
    """Candidates by falling probability, or with `random` drawn without replacement. Implements `LanguageModel`."""

    unread, is_sequential = 1, False

    def __init__(
        self, table: NDArray[np.float64], random: np.random.Generator | None = None, thread: ThreadPoolExecutor | None = None
    ) -> None:
        """`table` is [V, V]: row t holds the probabilities after token t. `thread`, if given, runs the work of `beside`."""
        self._table = table
        with np.errstate(divide="ignore"):
            self._logs = np.log(table)
        self._random = random
        self._thread = thread
        self._text: list[int] = []
        self.rows: list[int] = []
        self.forwards: list[int] = []  # rows per forward

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        self._text, self.rows = text.tokens.tolist(), []

    @property
    def space(self) -> int:
        return 64 - max(0, len(self.rows) - 1)

    def root(self, count: int) -> Candidates:
        self.rows = self._text[-1:]
        self.forwards.append(1)
        return self._candidates(self.rows, count)

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        assert all(0 <= parent < len(self.rows) + number for number, parent in enumerate(parents))
        self.rows += tokens
        self.forwards.append(len(tokens))
        return self._candidates(tokens, count)

    def read(self, tokens: int) -> int:
        return 0

    def retract(self, rows: int) -> None:
        del self.rows[rows:]

    def advance(self, tokens: Ints) -> None:
        follow = self.rows[1 : len(tokens) + 1] == tokens.tolist()
        self.rows = self.rows[len(tokens) :] if follow else []
        self._text += tokens.tolist()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[T] = Future()
        done.set_result(work())
        return done

    def _candidates(self, tokens: Collection[int], count: int) -> Candidates:
        last = [token % len(self._table) for token in tokens]  # it reads what it does not know as another token
        shares, scores = self._table[last], self._logs[last]
        if self._random is not None:
            scores = scores + self._random.gumbel(size=shares.shape)
        best = np.argsort(-scores, axis=1)[:, :count]
        q = None if self._random is None else shares.astype(np.float32)
        return Candidates(best.astype(np.int32), shares[np.arange(len(last))[:, None], best].astype(np.float32), q)
