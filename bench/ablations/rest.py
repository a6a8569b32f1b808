"""REST's tables and figures (arXiv 2311.08252): mean generated lengths by datastore, selection and match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bench.ablations.material import GREEDY, CorpusName, Material, StreamName
from bench.ablations.size import Row
from bench.ablations.study import Ablation, Case
from outrider.drafters.options import Options, RetrievalOptions
from outrider.drafters.registry import Resources
from outrider.drafters.retrieval import RetrievalDrafter, insert
from outrider.drafters.tables.trie import restart
from outrider.verify.sampling_params import SamplingParams

# Matches of 16 to 2 tokens, of which 128 stand for the paper's 5,000.
PAPER = RetrievalOptions(shortest=2)
# The paper's nucleus sampling.
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.95, rule="rejection")
LENGTH, OURS = "M", "M, `retrieval`"
RANDOM_SEQUENCES = RANDOM_TOKENS = 8


class RandomRetrieval(RetrievalDrafter):
    """Drafts at most eight of the retrieved continuations, chosen at random, of eight tokens each."""

    def __init__(self, resources: Resources, random: np.random.Generator) -> None:
        super().__init__(resources.corpus, PAPER)
        self._random = random

    def _collect(self, match: int) -> int:
        low, high = int(self._low[0, match]), int(self._high[0, match])
        restart(self._trie)
        size = 1
        for place in self._random.choice(high - low, min(RANDOM_SEQUENCES, high - low), replace=False).tolist():
            start = low + place
            size = insert(self._trie, size, self._blocks[0], start, start + 1, match, 1, RANDOM_TOKENS)
        return size


def stored(stream: StreamName, corpus: CorpusName, share: float = 1.0) -> Case:
    """REST and our drafter with a share of a corpus as the datastore."""

    def measure(material: Material) -> Row:
        paper, ours = (
            material.replay(stream, "retrieval", Options(retrieval=options), corpus, share).tokens_per_step
            for options in (PAPER, RetrievalOptions())
        )
        return {"tokens": len(material.corpus(corpus, share)), LENGTH: paper, OURS: ours}

    return Case({"share": share}, measure)


def selected(stream: StreamName, method: str) -> Case:
    """Continuations from the trie, or random ones."""

    def measure(material: Material) -> Row:
        random = np.random.default_rng(0)
        new = (lambda resources: RandomRetrieval(resources, random)) if method == "random" else None
        tally = material.replay(stream, "retrieval", Options(retrieval=PAPER), "library", new=new)
        return {LENGTH: tally.tokens_per_step}

    return Case({"selection": method}, measure, {"paper": {"random": 2.51, "trie": 2.65}[method]})


def limited(nodes: int = 64, **changed: Any) -> Callable[[Material], Row]:
    """Mean generated lengths on both streams with changed options or another number of draft tokens."""
    options = Options(retrieval=replace(PAPER, **changed))

    def measure(material: Material) -> Row:
        chat = material.replay("chat", "retrieval", options, "chat", nodes=nodes)
        code = material.replay("code", "retrieval", options, "library", nodes=nodes)
        return {"M, chat": chat.tokens_per_step, "M, code": code.tokens_per_step}

    return measure


def chains(length: int) -> Case:
    """Plain speculative decoding with drafts of this length, on the embedded pair."""

    def measure(material: Material) -> Row:
        options = {"gamma": length, "theta_prob": 0.0, "only_if_worth": False}
        greedy, sampled = (material.decode("draft", params, draft=options).tokens_per_step for params in (GREEDY, NUCLEUS))
        return {"M, greedy": greedy, "M, nucleus": sampled}

    return Case({"draft tokens": length}, measure)


ABLATIONS = (
    Ablation(
        "rest-table-2",
        "Table 2: datastore size, code",
        "CodeLlama-7B on HumanEval: M is 1.96, 2.18, 2.35, 2.45 and 2.65 with 0.9, 4.4, 8.7, 14 and 27 GB.",
        [stored("code", "library", share) for share in (1 / 30, 1 / 6, 1 / 3, 1 / 2, 1.0)],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "rest-table-3",
        "Table 3: selection of draft tokens",
        "Draft tokens from the trie give longer answers per step than random continuations.",
        [selected("code", method) for method in ("random", "trie")],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "rest-table-4",
        "Table 4: datastore size, chats, greedy",
        "A datastore of 12 GB is 7 % faster than one of 465 MB (15.12 and 16.23 ms per token).",
        [stored("chat", "chat", share) for share in (0.04, 0.25, 1.0)],
        needs_recordings=True,
    ),
    Ablation(
        "rest-table-5",
        "Table 5: datastore size, sampled answers",
        "The same with nucleus sampling: 16.02 and 16.98 ms per token. Here: CodeGen's code, on the datastore of chats.",
        [stored("code", "chat", share) for share in (0.04, 0.25, 1.0)],
        needs_recordings=True,
    ),
    Ablation(
        "rest-figure-3",
        "Figure 3: maximum suffix length",
        "Slower below 6 tokens, and no difference above.",
        [Case({"longest": longest}, limited(longest=longest)) for longest in (2, 3, 4, 5, 6, 8, 12, 16)],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "rest-figures-4-11",
        "Figures 4 to 11: speculative decoding by draft length",
        "Drafts of 1 to 15 tokens are tried for each model, and the fastest length is the baseline.",
        [chains(length) for length in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)],
        wide=True,
    ),
    Ablation(
        "rest-figure-12",
        "Figure 12: number of draft tokens",
        "Faster up to 48 draft tokens, the same up to 200, slower beyond.",
        [Case({"draft tokens": nodes}, limited(nodes)) for nodes in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)],
        needs_recordings=True,
        wide=True,
    ),
)
