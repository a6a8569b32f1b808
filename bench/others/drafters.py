"""Drafts of other programs, whose own code is imported only when it is used. Each class implements `Drafter`."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from outrider.drafters.interface import EMPTY, NOTHING, Drafter, DraftTree, Ints, Sampling, Source, Verdict, arrange
from outrider.drafters.sequence import Sequence as Text
from outrider.drafters.state import Stateless

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

# The defaults of vLLM, which uses the suffix cache.
TREE_DEPTH = 24
LEAST_PROBABILITY = 0.1
# How often the target chooses a token of each rank, about.
RANK_SHARES = (0.5, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
# The request that is replayed. Earlier responses have the numbers of their documents.
REQUEST = -1


class Other(Stateless):
    """A drafter that drafts from the text alone and learns nothing else."""

    feedback = 0
    prunable = True

    def __init__(self) -> None:
        self._text = Text()

    def begin(self, sequence: Text, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._text = sequence

    @abstractmethod
    def propose(self, budget: int, least: float = 0.0) -> DraftTree: ...

    def observe(self, verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass


class PromptLookup(Other):
    """A program's prompt lookup: the tokens after an earlier occurrence of the last ones."""

    def __init__(self, look_up: Callable[[Ints], Ints]) -> None:
        """`look_up` returns the draft for a text, both int32."""
        super().__init__()
        self._look_up = look_up

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        tokens = self._look_up(self._text.tokens)[:budget]
        probability = 0.5 ** np.arange(1, len(tokens) + 1)
        return tree_of(tokens.tolist(), range(-1, len(tokens) - 1), probability.tolist())


class SuffixCache(Other):
    """The suffix trees of arctic-inference: of this request, and of earlier responses, of which it uses the better match."""

    def __init__(self, cache: SuffixDecodingCache, factor: float, as_tree: bool) -> None:
        """A draft has at most `factor` tokens per matched token."""
        super().__init__()
        self._cache = cache
        self._factor = factor
        self._as_tree = as_tree

    def begin(self, sequence: Text, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        super().begin(sequence)
        self._cache.start_request(REQUEST, sequence.tokens)

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        context = np.ascontiguousarray(self._text.tokens[-TREE_DEPTH:])
        draft = self._cache.speculate(REQUEST, context, budget, self._factor, 0.0, LEAST_PROBABILITY, self._as_tree)
        return tree_of(draft.token_ids, draft.parents, draft.probs)

    def observe(self, verdict: Verdict) -> None:
        self._cache.add_active_response(REQUEST, verdict.tokens)

    def end(self) -> None:
        self._cache.stop_request(REQUEST)
        if REQUEST in self._cache.cached_requests:
            self._cache.evict_cached_response(REQUEST)


class TokenRecycling(Other):
    """Token Recycling (arXiv 2408.08696): for each token, the target's likeliest next ones when it was last computed.

    Drafts are trees of fixed shape over the ranks of these tokens: the likeliest nodes if only the ranks decide. The paper's
    shape has 80 nodes.
    """

    feedback = len(RANK_SHARES)

    def __init__(self) -> None:
        super().__init__()
        self._followers: dict[int, list[int]] = {}

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        tokens, parents, probability = list[int](), list[int](), list[float]()
        waiting = [(-1.0, -2, int(self._text.tokens[-1]))]  # negative path probability, parent and token; -2: the root itself
        while waiting and len(tokens) < budget:
            path, parent, token = heapq.heappop(waiting)
            if parent > -2:
                tokens.append(token)
                parents.append(parent)
                probability.append(-path)
            for share, follower in zip(RANK_SHARES, self._followers.get(token, []), strict=False):
                heapq.heappush(waiting, (path * share, len(tokens) - 1, follower))
        return tree_of(tokens, parents, probability)

    def observe(self, verdict: Verdict) -> None:
        root = int(self._text.tokens[-1 - len(verdict.tokens)])
        for token, likeliest in zip([root, *verdict.tree.tokens.tolist()], verdict.topk_ids.tolist(), strict=True):
            self._followers[token] = likeliest


def tree_of(tokens: Sequence[int], parents: Sequence[int], probability: Sequence[float]) -> DraftTree:
    """The draft with these nodes; -1 = the root."""
    if not tokens:
        return EMPTY
    return arrange([*tokens], [*parents], [*probability], [Source.LOOKUP] * len(tokens))[0]


def transformers_lookup() -> Drafter:
    """The prompt lookup of transformers, with its defaults."""
    generator = PromptLookupCandidateGenerator(max_length=1 << 30)

    def look_up(text: Ints) -> Ints:
        found: Ints = generator.get_candidates(torch.from_numpy(text)[None])[0][0].numpy()
        return found[len(text) :]

    return PromptLookup(look_up)


def llama_lookup() -> Drafter:
    """The prompt lookup of llama-cpp-python, with its defaults."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    decoding = LlamaPromptLookupDecoding()
    return PromptLookup(lambda text: np.asarray(decoding(text), np.int32))


def suffix_cache(documents: Sequence[Ints]) -> SuffixDecodingCache:
    """A cache that holds the documents as earlier responses; without any, it keeps none."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(TREE_DEPTH, -1 if documents else 0)
    for number, document in enumerate(documents):
        cache.start_request(number, np.empty(0, np.int32))
        cache.add_active_response(number, document)
        cache.stop_request(number)
    return cache
