"""Acceptance: which path of a draft tree the target agrees to, by one of two rules.

`keyed`: the target chooses its own token at every node, with noise that depends on seed and position alone; descend while
that token is a child. The answer is the same for every draft. `rejection`: a child is accepted with a probability that
makes the answer's *distribution* the target's; it accepts more of what a draft model has sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.interface import DraftTree, Ints
from verify.model.transfer import to_device, to_host
from verify.sampling import Sampler, uniform, warp_logits
from verify.sampling_params import SamplingParams


class Rule(Protocol):
    """Decides for one request."""

    def decide(
        self, logits: torch.Tensor, tree: DraftTree, first: int, beside: Sequence[torch.Tensor] = ()
    ) -> tuple[Ints, Ints, list[Any]]:
        """Accepted rows [A] and emitted tokens [A+1], from logits [N+1, V]; `first` is the next output position.

        Also returns the tensors `beside`, as `to_host` does: they cross in the same copy.
        """


def rule_of(params: SamplingParams) -> Rule:
    """The rule that a request asks for. Greedy decoding needs no second one."""
    return Rejection(params) if params.rule == "rejection" and not params.greedy else Keyed(params)


class Keyed:
    """The target's own choice at every node. Implements `Rule`."""

    def __init__(self, params: SamplingParams) -> None:
        self._chooser = Sampler(params)

    def decide(
        self, logits: torch.Tensor, tree: DraftTree, first: int, beside: Sequence[torch.Tensor] = ()
    ) -> tuple[Ints, Ints, list[Any]]:
        positions = [first, *(tree.depths + first).tolist()]
        choices = self._chooser.sample(logits, positions)
        if choices.device.type == "cpu":
            return *walk(tree, choices.tolist()), to_host(*beside)
        chosen, agreed, *others = to_host(choices.int(), accepted(choices, tree).int(), *beside)
        rows = np.flatnonzero(agreed[1:]).astype(np.int32)
        return rows, chosen[[0, *(rows + 1).tolist()]], others


def accepted(chosen: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """`walk` where the choices (int64 [N+1]) are: bool [N+1], the root and the accepted nodes, without a look from the host.

    A node is accepted if it and all its ancestors are what the target chose at their parents; siblings differ, so those are
    one path, and the nodes stand in its order.
    """
    if not len(tree):
        return torch.ones_like(chosen, dtype=torch.bool)
    tokens, parents = to_device(torch.from_numpy(np.stack([tree.tokens, tree.parents + 1]).astype(np.int64)), chosen.device)
    wrong = torch.nn.functional.pad(tokens != chosen[parents], (1, 0))
    ancestors = to_device(torch.from_numpy(tree.ancestors), chosen.device)
    return ~(ancestors & wrong).any(1)


def walk(tree: DraftTree, chosen: Sequence[int]) -> tuple[Ints, Ints]:
    """`chosen` [N+1] is the target's token at the root and at each node; returns accepted rows [A] and tokens [A+1].

    The tokens are exactly those of plain decoding: each was chosen by the target with only accepted tokens before it.
    """
    children = {(int(p), int(t)): row for row, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows: list[int] = []
    tokens = [chosen[0]]
    node = children.get((-1, chosen[0]))
    while node is not None:
        rows.append(node)
        tokens.append(chosen[node + 1])
        node = children.get((node, chosen[node + 1]))
    return np.array(rows, np.int32), np.array(tokens, np.int32)


class Rejection:
    """Speculative sampling: Leviathan et al. (arXiv 2211.17192) for a chain, recursive for siblings. Implements `Rule`."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def decide(
        self, logits: torch.Tensor, tree: DraftTree, first: int, beside: Sequence[torch.Tensor] = ()
    ) -> tuple[Ints, Ints, list[Any]]:
        weights = warp_logits(logits, self._params)
        rows: list[int] = []
        tokens: list[int] = []
        node = -1
        while True:
            target = weights[node + 1].double().softmax(-1).cpu().numpy()
            drawn = None if tree.q is None or not tree.q[node + 1].any() else tree.q[node + 1].astype(np.float64)
            children = np.flatnonzero(tree.parents == node).tolist()
            position = first + len(rows)
            noise = [uniform(self._params.seed, position, number) for number in range(len(children) + 1)]
            accepted, token = descend(target, drawn, [int(tree.tokens[row]) for row in children], noise)
            tokens.append(token)
            if accepted is None:
                return np.array(rows, np.int32), np.array(tokens, np.int32), to_host(*beside)
            node = children[accepted]
            rows.append(node)


def descend(
    target: NDArray[np.float64],  # [V]; the target's distribution
    drawn: NDArray[np.float64] | None,  # [V]; what the children were drawn from, one after the other, without replacement
    children: Sequence[int],  # their tokens, in that order
    noise: Sequence[float],  # one number in [0, 1) for each child, and one more
) -> tuple[int | None, int]:
    """Which child is accepted, and its token; or None and a token drawn from what is left.

    A child x is accepted with probability min(1, p(x) / q(x)); where it is not, p becomes max(p - q, 0) and q loses x,
    both normalised. Without `drawn`, a child was no draw at all: q(x) = 1.
    """
    left, draft = target, drawn
    for number, token in enumerate(children):
        share = 1.0 if draft is None else draft[token]
        if noise[number] * share < left[token]:
            return number, token
        if draft is None:
            left = left.copy()
            left[token] = 0.0
        else:
            left = np.maximum(left - draft, 0.0)
            draft = draft.copy()
            draft[token] = 0.0
            draft /= max(draft.sum(), 1e-300)
        left /= max(left.sum(), 1e-300)
    mass = np.cumsum(left)
    return None, int(np.searchsorted(mass, noise[-1] * mass[-1], "right"))
