"""How much merging changes a draft model's distribution of the next token (GSD's Table 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafters.interface import DraftTree
from outrider.drafters.model.draft_graph import DraftGraphDrafter
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.options import DraftGraphOptions
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.runner import ModelRunner

# The paper's number of examples.
EXAMPLES = 1000

Merge = tuple[list[int], list[int]]  # the texts that end with a redundant node and with the one that it is merged with


class RecordingGraphs(DraftGraphDrafter):
    """Records the first merges."""

    def __init__(self, model: LanguageModel, options: DraftGraphOptions, merges: list[Merge]) -> None:
        super().__init__(model, options)
        self._recorded = merges

    def _tree(self, budget: int) -> DraftTree:
        for pair in self._merges.items():
            if len(self._recorded) < EXAMPLES:
                own, merged = map(self._text, pair)
                self._recorded.append((own, merged))
        return super()._tree(budget)

    def _text(self, node: int) -> list[int]:
        return [*self._sequence.tokens.tolist(), *(self._nodes[index].token for index in self._path(node)[::-1])]


def divergence(runner: ModelRunner, merges: Sequence[Merge]) -> float:
    """The mean KL divergence, in nats, of a model's distribution after the merged text from that after the node's own."""
    total = 0.0
    for texts in merges:
        own, merged = (logarithms(runner, text) for text in texts)
        total += float((own.exp() * (own - merged)).sum())
    return total / len(merges)


def logarithms(runner: ModelRunner, text: Sequence[int]) -> torch.Tensor:
    """The logarithms of the next token's probabilities, float64 [V]."""
    logits = runner.forward(runner.new_cache(), ForwardBatch.chain(torch.tensor(text)), logits=False)
    return logits[0].double().log_softmax(-1)
