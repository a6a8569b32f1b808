"""vLLM: `--speculative-config` with `{"method": "custom_class", "model": "outrider.engines.vllm.Proposer"}`.

vLLM verifies chains and passes the text of each request at every step, but not which request it is: a request is known by its
text. vLLM's rejection sampler keeps answers those of the model alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints
from outrider.drafters.library import LearnedText, Resources, Session
from outrider.drafters.options import DrafterName


class Proposer:
    """Proposes chains for all requests of a vLLM engine. A subclass sets the options, and its dotted name is the `model`.

    Each request has a session, which lasts until the first step without the request. What the answers said stays in one text
    of `learned_tokens` tokens, from which later requests draft, whoever sent them; 0 turns that off.
    """

    drafter: DrafterName = "fusion"
    least = 0.1  # the least path probability of a token in a chain
    learned_tokens = 1 << 16

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError if there is no such drafter."""
        vocabulary = vllm_config.model_config.get_vocab_size()
        self._length: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_tokens: int = vllm_config.model_config.max_model_len
        self._learned = LearnedText(self.learned_tokens, vocabulary) if self.learned_tokens else None
        self._resources = Resources(corpus=self._learned or (), vocabulary=vocabulary)
        self.sessions: dict[int, Session] = {}  # of the requests of the last step, by row
        self._ended = 0  # requests
        Session(self.drafter, self._resources)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The tokens that may follow each request's text; `sampled_token_ids` are the last step's.

        The text of row i is `token_ids_cpu[i, : num_tokens_no_spec[i]]`. A row without sampled tokens is part of a prompt, and
        gets no draft.
        """
        before, self.sessions = self.sessions, {}
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row in (row for row, sampled in enumerate(sampled_token_ids) if len(sampled)):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            session = self.sessions[row] = self._find(row, text, before)
            session.read(text)
            room = min(self._length, self._max_tokens - len(text) - 1)
            if room > 0:
                drafts[row] = session.propose_chain(room, self.least).tokens.tolist()
        for session in before.values():
            self._end(session)
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Required by vLLM; there is no model to load."""

    def _find(self, row: int, text: Ints, before: dict[int, Session]) -> Session:
        """Moves the session of a text, int32 [T], out of those of the last step, or makes one.

        Rows move when other requests end. A session of the same text will do: it has learned the same.
        """
        rows = (row,) if row in before and before[row].continues(text) else before
        found = next((each for each in rows if before[each].continues(text)), None)
        return Session(self.drafter, self._resources) if found is None else before.pop(found)

    def _end(self, session: Session) -> None:
        """Forgets a request, except for its text."""
        if self._learned is not None:
            self._learned.add(self._ended, session.tokens)
        self._ended += 1
        session.end()
