"""`fusion`: all sources in one tree, the likeliest nodes first.

The session's own text, the corpora, the tri-gram table with the target's feedback and the client's prediction are levels of
one mixture (see `drafters.tables.mixture`), so what each is worth is measured, not set. A path's probability is the product
of its tokens'; the tree is the `budget` likeliest paths, found best-first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.interface import EMPTY, MAX_NODES, NOTHING, DraftTree, Ints, Sampling, Verdict, common_prefix
from drafters.options import FusionOptions
from drafters.prediction import realign
from drafters.tables.adaptive import absorb, new_rows
from drafters.tables.history import new_history
from drafters.tables.kernel import kernel
from drafters.tables.levels import NODE_SOURCES, TABLE_ORDER, Contexts, Scratch, Sources, advance, new_contexts, new_scratch
from drafters.tables.mixture import MAX_BOOST, MIN_MASS, STRENGTH, cell, commit, load_prior, predict
from drafters.tables.ngram import BaseArrays
from drafters.tables.nodes import Nodes, draft_tree, new_nodes, reset
from drafters.tables.suffix import LONGEST_CONTEXT, Corpus, index
from drafters.trigram import NO_TEXT

LEAST_PATH = 1e-6
LEAST_GAIN = 0.5  # a node is expanded only if a child of this probability would enter a full tree
SPARE = 3.0  # contexts are asked until their mass left could not put a node this near the worst into a full tree


class FusionDrafter:
    """Fusion for one session. Implements `Drafter`."""

    def __init__(self, base: BaseArrays, corpora: Sequence[Corpus], options: FusionOptions, vocabulary: int) -> None:
        """`vocabulary` is a number that no token reaches."""
        trust, boost = load_prior()
        blocks = tuple(corpora) or (index(np.empty(0, np.int64), vocabulary),)
        self._options = options
        self._sources = Sources(
            blocks,
            new_history(options.capacity),
            base,
            new_rows(options.contexts, options.successors),
            np.zeros(1, np.int32),
            trust * STRENGTH,
            np.full(len(trust), STRENGTH),
            boost,
        )
        self._contexts = new_contexts(1 + MAX_NODES, len(blocks))
        self._scratch = new_scratch(vocabulary, len(blocks), 2 * options.successors)
        self._nodes = new_nodes(1 + MAX_NODES)
        self._rank = np.zeros(1 + MAX_NODES, np.int32)
        self._text = NOTHING  # all committed tokens of the session's last request
        self.feedback = options.feedback

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        expected = np.concatenate([[len(prediction)], prediction]).astype(np.int32)
        self._sources = self._sources._replace(expected=expected)
        prompt = np.asarray(prompt, np.int32)
        # A conversation's next prompt repeats what is known already.
        known = common_prefix(self._text, prompt)
        self._text = prompt[:known]
        enter(self._sources, self._contexts, prompt[max(0, known - LONGEST_CONTEXT) : known])
        self._commit(prompt[known:])
        self._contexts.expected[0] = (1, 0) if len(prediction) else (0, 0)

    def propose(self, budget: int) -> DraftTree:
        if budget <= 0 or not len(self._text):
            return EMPTY
        size = _grow(
            *(self._sources, self._contexts, self._scratch, self._nodes, self._rank),
            *(min(budget, MAX_NODES), self._options.depth),
        )
        return draft_tree(self._nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        before = np.concatenate([NO_TEXT, self._text[-3:]])[-3:]
        self._commit(verdict.tokens)
        if verdict.topk_ids.shape[-1]:
            tree = verdict.tree
            absorb(
                *(self._sources.base, self._sources.rows, before, tree.tokens, tree.parents),
                *(verdict.topk_ids, verdict.topk_probs, TABLE_ORDER),
            )
        self._follow(len(verdict.tokens))

    def end(self) -> None:
        self._sources = self._sources._replace(expected=np.zeros(1, np.int32))

    def _commit(self, tokens: Ints) -> None:
        self._expected_before = int(self._contexts.expected[0, 0])
        _commit_all(self._sources, self._contexts, self._scratch, tokens)
        self._text = np.concatenate([self._text, tokens])

    def _follow(self, emitted: int) -> None:
        """Finds the place in the prediction again after the answer has left it."""
        expected = self._sources.expected[1:]
        if len(expected) and self._contexts.expected[0, 0] == 0:
            near = max(0, self._expected_before - 1) + emitted
            self._contexts.expected[0] = (1 + min(len(expected), realign(expected, self._text[-8:], near)), 0)


@kernel
def _commit_all(sources: Sources, contexts: Contexts, scratch: Scratch, tokens: NDArray[np.int32]) -> None:
    for token in tokens:
        commit(sources, contexts, scratch, token)


@kernel
def enter(sources: Sources, contexts: Contexts, ending: NDArray[np.int32]) -> None:
    """Makes row 0 the context of a text that ends with `ending`, without learning it again."""
    contexts.low[0] = 0
    contexts.high[0] = 0
    contexts.hashes[0] = 0
    contexts.last[0] = -1
    contexts.expected[0] = 0
    for c in range(len(sources.corpora)):
        contexts.high[0, c, 0] = sources.corpora[c].size
    for token in ending:
        advance(sources, contexts, 0, token, 0)


@kernel
def _grow(
    sources: Sources, contexts: Contexts, scratch: Scratch, nodes: Nodes, rank: NDArray[np.int32], budget: int, depth: int
) -> int:
    """Marks the `budget` likeliest paths; returns the number of nodes, node 0 included.

    rank[:size] are the nodes by falling path probability: those before `at` are expanded, the others wait. A child is
    never likelier than its parent, so the one list of at most `budget` nodes is both result and queue.
    """
    reset(nodes, 0)
    size, at, node = 0, -1, 0
    while True:
        worst = nodes.path[rank[size - 1]] if size == budget else LEAST_PATH
        if nodes.depths[node] < depth:
            size = _expand(sources, contexts, scratch, nodes, rank, node, at, size, budget)
            worst = nodes.path[rank[size - 1]] if size == budget else LEAST_PATH
        at += 1
        if at >= size:
            break
        node = rank[at]
        if size == budget and LEAST_GAIN * nodes.path[node] <= worst:
            break
        advance(sources, contexts, nodes.parents[node], nodes.tokens[node], node)
    return size + 1


@kernel
def _expand(
    sources: Sources,
    contexts: Contexts,
    scratch: Scratch,
    nodes: Nodes,
    rank: NDArray[np.int32],
    node: int,
    at: int,
    size: int,
    budget: int,
) -> int:
    """Adds the successors of `node` that are among the `budget` likeliest; returns how many nodes there are."""
    path = nodes.path[node]
    worst = nodes.path[rank[size - 1]] if size == budget else LEAST_PATH
    found = predict(sources, contexts, node, scratch, max(MIN_MASS, SPARE * worst / path if size == budget else 0.0))
    for x in range(found):
        if MAX_BOOST * path * scratch.probability[x] <= worst:
            continue
        probability = path * min(0.999, scratch.probability[x] * sources.boost[cell(scratch, x)])
        if probability <= worst:
            continue
        new = size + 1
        if size == budget:
            size -= 1
            new = rank[size]  # the worst gives its place up
        nodes.tokens[new] = scratch.out[x]
        nodes.parents[new] = node
        nodes.depths[new] = nodes.depths[node] + 1
        nodes.path[new] = probability
        nodes.source[new] = NODE_SOURCES[scratch.out_source[x]]
        nodes.chosen[new] = True
        place = size
        while place > at + 1 and nodes.path[rank[place - 1]] < probability:
            rank[place] = rank[place - 1]
            place -= 1
        rank[place] = new
        size += 1
        if size == budget:
            worst = nodes.path[rank[size - 1]]
    return size
