"""ADED's tables and figures (arXiv 2407.12021): accepted lengths of tri-gram drafts, by corpus, search and sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.ablations.material import Material, StreamName
from bench.ablations.size import Row
from bench.ablations.study import Ablation, Case
from outrider.drafters.options import Options, RetrievalOptions, TrigramOptions
from outrider.verify.sampling_params import SamplingParams

# 24 continuations of 4 tokens, adapted to the whole prompt.
PAPER = TrigramOptions(search="mcts", depth=4)
REST = Options(retrieval=RetrievalOptions(shortest=2))
# The configuration of Lookahead's authors for a 7B model.
LADE = {"ngram": 5, "window": 15, "guesses": 15}
# The rows of its window, and as many of its guesses.
LADE_NODES = 120
CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
LENGTH = "tokens per step"


def drafted(**changed: Any) -> Callable[[Material], Row]:
    """Tokens per step of the paper's drafter on the recorded chats. `changed`: options, or the share of the corpus."""
    share = changed.pop("share", 1.0)
    options = Options(trigram=replace(PAPER, **changed))
    return lambda material: {LENGTH: material.replay("chat", "trigram", options, share=share).tokens_per_step}


def adapted(adaptation: str, **changed: Any) -> Case:
    """The same with a table for each answer, and with one table that all answers raise, as in the authors' program."""
    options = Options(trigram=replace(PAPER, **changed))

    def measure(material: Material) -> Row:
        alone, carried = (material.replay("chat", "trigram", options, carry=carry) for carry in (False, True))
        return {LENGTH: alone.tokens_per_step, "one table for all answers": carried.tokens_per_step}

    return Case({"adaptation": adaptation}, measure)


def searched(reward: str, ranking: str, **changed: Any) -> Case:
    """Algorithm 1 with another reward or ranking."""
    return Case({"reward": reward, "ranking": ranking}, drafted(reward=reward, ranking=ranking, **changed))


def sampled(params: SamplingParams) -> Callable[[Material], Row]:
    """Tokens per step of the paper's drafter on the embedded model."""
    options = {"search": "mcts", "depth": 4}
    return lambda material: {LENGTH: material.decode("trigram", params, trigram=options).tokens_per_step}


def compared(stream: StreamName) -> Callable[[Material], Row]:
    """REST, ADED and fusion on recorded answers."""

    def measure(material: Material) -> Row:
        return {
            "REST": material.replay(stream, "retrieval", REST).tokens_per_step,
            "Lookahead": None,
            "ADED": material.replay(stream, "trigram", Options(trigram=PAPER)).tokens_per_step,
            "`trigram`": material.replay(stream, "trigram").tokens_per_step,
            "`fusion`": material.replay(stream, "fusion").tokens_per_step,
        }

    return measure


def embedded(material: Material) -> Row:
    """Lookahead needs a target's forwards, which a recording cannot give."""
    return {
        "REST": None,
        "Lookahead": material.decode("lookahead", nodes=LADE_NODES, lookahead=LADE).tokens_per_step,
        "ADED": material.decode("trigram", trigram={"search": "mcts", "depth": 4, "feedback": 0}).tokens_per_step,
        "`trigram`": material.decode("trigram").tokens_per_step,
        "`fusion`": material.decode("fusion").tokens_per_step,
    }


def category(name: str) -> Case:
    """The recorded chats of one category."""

    def measure(material: Material) -> Row:
        lines = [line for line in material.lines("chat") if line.category == name]
        return {LENGTH: material.replay(lines, "trigram", Options(trigram=PAPER)).tokens_per_step if lines else None}

    return Case({"category": name}, measure)


ABLATIONS = (
    Ablation(
        "aded-table-1",
        "Table 1: accept length",
        "More than REST and Lookahead (in this order in the last column, for Vicuna-7B) on MT-Bench and HumanEval.",
        [
            Case({"answers": "Vicuna, MT-Bench"}, compared("chat"), {"paper": "1.97, 1.89, 2.42"}),
            Case({"answers": "CodeGen, HumanEval"}, compared("code"), {"paper": "2.21, 2.10, 2.67"}),
            Case({"answers": "embedded, greedy"}, embedded),
        ],
        needs_recordings=True,
    ),
    Ablation(
        "aded-table-2",
        "Table 2: corpus size",
        "2.30 tokens per step with a corpus of 253 MB, 2.42 with 574 MB.",
        [Case({"share of the corpus": share}, drafted(share=share)) for share in (0.01, 0.06, 0.125, 0.25, 0.5, 1.0)],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-figure-4a",
        "Figure 4a: the adaptive strategy",
        "A higher accept length with the strategy, over all lengths of the answer.",
        [
            adapted("none", adaptive=False),
            adapted("Algorithm 2", max_length=16, increment=0.04, maximum=3.0),
            adapted("Algorithm 2, whole text", max_length=1 << 16, increment=0.04, maximum=3.0),
            adapted("ours"),
        ],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-figure-4b",
        "Figure 4b: tasks of MT-Bench",
        "The accept length is stable across the categories.",
        [category(name) for name in CATEGORIES],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-figure-5a",
        "Figure 5a: top-p",
        "The accept length does not depend on top-p.",
        [
            Case({"top-p": p}, sampled(SamplingParams(temperature=1.0, top_p=p)))
            for p in (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        ],
        wide=True,
    ),
    Ablation(
        "aded-figure-5b",
        "Figure 5b: temperature",
        "The accept length does not depend on the temperature.",
        [
            Case({"temperature": t}, sampled(SamplingParams(temperature=t)))
            for t in (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        ],
        wide=True,
    ),
    Ablation(
        "aded-figure-6",
        "Figure 6: searches",
        "More searches give longer drafts, up to an optimum; greedy search gives 1.493.",
        [
            *(Case({"searches": count}, drafted(iterations=count)) for count in (10, 25, 50, 75, 100, 150, 200, 300)),
            Case({"searches": "greedy"}, drafted(search="greedy")),
        ],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-figure-7a",
        "Figure 7a: c1",
        "The accept length rises with moderate exploration, and falls at either extreme.",
        [Case({"c1": c1}, drafted(c1=c1)) for c1 in (0.5, 1.0, 2.414, 8.0, 32.0, 128.0, 512.0)],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-figure-7b",
        "Figure 7b: 1 / c2",
        "The same for the reciprocal of c2.",
        [Case({"1 / c2": 1 / c2}, drafted(c2=c2)) for c2 in (512.0, 128.0, 32.0, 8.0, 2.0, 0.5, 0.125)],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-algorithm-1",
        "Algorithm 1: reward and ranking",
        "The printed reward is 1 plus the sum of the tokens' probabilities, and continuations are ranked by their rewards.",
        [
            searched("mean", "score"),
            searched("sum", "score"),
            searched("mean", "visits", candidates=64),
            searched("sum", "visits", candidates=64),
            searched("mean", "path"),
        ],
        needs_recordings=True,
        wide=True,
    ),
    Ablation(
        "aded-n-grams",
        "Choice of the n-gram model (text)",
        "Tri-grams give 2.30, bi-grams 1.80 and 4-grams 1.82.",
        [Case({"order": order}, drafted(order=order)) for order in (2, 3, 4)],
        needs_recordings=True,
        wide=True,
    ),
)
