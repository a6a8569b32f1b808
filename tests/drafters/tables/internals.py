"""Functions and constants of the compiled library that only tests read; its headers say what they mean."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints
from outrider.drafters.native.library import native
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.learned_table import LearnedRows
from outrider.drafters.tables.mixture import Contexts, History, Scratch, Sources
from outrider.drafters.tables.nodes import Nodes
from outrider.drafters.tables.pages import Pages
from outrider.drafters.tables.suffix import Corpus

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
Keys = NDArray[np.uint64]

HOPS, STATES = 32, 1  # automaton.h
MAX_OCCURRENCES, MAX_GAP, POSITION = 8, 8, 0  # history.h
DISCOUNT = 0.5  # levels.h
MIN_MASS = 1e-3  # mixture.h
base_table, dice, history, learned_table, mixture, nodes, pages, suffix = (
    partial(native, module=name)
    for name in ("base_table", "dice", "history", "learned_table", "mixture", "nodes", "pages", "suffix")
)


@base_table
def context_key(before: int, previous: int, last: int) -> np.uint64: ...
@base_table
def find(base: BaseArrays, key: np.uint64) -> int: ...


@dice
def position_key(seed: np.uint64, position: int) -> np.uint64: ...
@dice
def random_bits(key: np.uint64, token: int) -> np.uint64: ...
@dice
def exponential(bits: np.uint64) -> float: ...


@history
def extend_hashes(before: Keys, token: int, after: Keys) -> None: ...
@history
def append(history: History, hashes: Keys, token: int) -> None: ...
@history
def followers(history: History, length: int, key: np.uint64, tokens: Longs, counts: Doubles, start: int) -> tuple[int, int]: ...
@history
def find_copy(history: History, key: np.uint64, copy: Longs) -> None: ...
@history
def follow_copy(history: History, before: Longs, previous: int, token: int, after: Longs, committed: bool) -> None: ...


@learned_table
def successors(
    base: BaseArrays,
    rows: LearnedRows,
    before: int,
    previous: int,
    last: int,
    order: int,
    tokens: Ints,
    probabilities: NDArray[np.float32],
) -> int: ...


@mixture
def predict(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, min_mass: float) -> int: ...
@mixture
def commit(sources: Sources, contexts: Contexts, scratch: Scratch, token: int) -> float: ...


@nodes
def reset(nodes: Nodes, last: int) -> None: ...


@pages
def word(pages: Pages, at: int) -> int: ...


@suffix
def position_at(corpus: Corpus, index: int) -> int: ...
@suffix
def narrow(corpus: Corpus, low: int, high: int, length: int, token: int) -> tuple[int, int]: ...
@suffix
def follow(corpus: Corpus, low: Longs, high: Longs, token: int, next_low: Longs, next_high: Longs) -> None: ...
@suffix
def frequent_row(corpus: Corpus, low: int, length: int) -> int: ...
