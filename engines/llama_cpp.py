"""llama-cpp-python: `Llama(model_path, draft_model=outrider.engines.llama_cpp.DraftModel())`.

llama-cpp-python verifies chains and passes the whole text at every step; a session reads only what is new in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from outrider.drafters.library import Resources, Session
from outrider.drafters.options import DrafterName


class DraftModel(LlamaDraftModel):  # type: ignore[misc]
    """Drafts for one `Llama`, whose answers it learns from: from one text to the next, too."""

    def __init__(
        self,
        drafter: DrafterName = "fusion",
        resources: Resources | None = None,
        length: int = 8,
        least: float = 0.4,
        session: Session | None = None,
    ) -> None:
        """A chain has at most `length` tokens, each with a path probability of at least `least`.

        A `session` goes on with what it has learned; without one, `drafter` names what drafts. Raises ValueError.
        """
        self.session = session or Session(drafter, resources)
        self._length = length
        self._least = least

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """The tokens that may follow the text, int32 [T]."""
        self.session.read(input_ids)
        return self.session.propose_chain(self._length, self._least).tokens.astype(np.intc)
