"""Small sources without a base table, for tests."""

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.contexts import Sources
from outrider.drafters.tables.history import new_history
from outrider.drafters.tables.learned_table import new_rows
from outrider.drafters.tables.levels import BUCKETS
from outrider.drafters.tables.mixture import CELLS
from outrider.drafters.tables.suffix import Corpus

NO_PREDICTION = np.zeros(1, np.int32)


def new_sources(
    corpora: tuple[Corpus, ...], trust: float, tries: float, expected: NDArray[np.int32] = NO_PREDICTION
) -> Sources:
    """Empty session state over `corpora`; all levels have the same `trust`, from `tries` tokens."""
    return Sources(
        corpora=corpora,
        history=new_history(512),
        base=empty_base(),
        rows=new_rows(64, 4),
        expected=expected,
        hits=np.full(BUCKETS, trust * tries),
        tries=np.full(BUCKETS, tries),
        boost=np.ones(CELLS),
    )
