"""Acceptance rules: which path of a draft tree is accepted, and which token follows it.

`keyed`: the target chooses its own token at every node, with noise that depends on seed and position alone; the walk
descends while that token is a child. The answer is the same for every draft. `rejection`: a child is accepted with a
probability that makes the answer's *distribution* the target's; it accepts more of the tokens that a draft model samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints
from outrider.verify.sampling.precision import check_finite
from outrider.verify.sampling.rows import is_on_host
from outrider.verify.sampling.sampler import choose, distribution, uniform
from outrider.verify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.verify.sampling.device import Together


# The logits of a step, `Logits` [N+1, V] or `ProcessedLogits`: row 0 is the root's, row i + 1 node i's.
NodeLogits: TypeAlias = Any
# The distribution to sample from, [V], by the logits [V] of one row. Raises ModelError if the largest one is not finite.
Probabilities = Callable[[Any, SamplingParams], NDArray[np.float64]]
# The accepted path (nodes, int32 [A]), the emitted tokens (int32 [A+1]), and other arrays.
Decision = tuple[Ints, Ints, list[Any]]


def decide(
    params: SamplingParams,
    logits: NodeLogits,
    tree: DraftTree,
    first: int,
    extra: Sequence[Any] = (),
    together: Together | None = None,
) -> Callable[[], Decision]:
    """Starts to decide by the logits of the root and N nodes; the returned function waits for the decision.

    It raises ModelError if the logits at an accepted node are not finite. `first` is the output position of the next token.
    `extra` are arrays, or tensors that are copied to the host together with the result and returned as arrays. With
    `together`, all of this is part of what several streams decide.
    """
    if params.rule == "rejection" and not params.greedy:  # greedy decoding is always `keyed`
        return _reject(params, logits, tree, first, extra, together)
    positions = [first, *(tree.depths + first).tolist()]
    if is_on_host(logits):
        return lambda: (*walk(tree, lambda row: choose(logits[row], params, positions[row])), [*extra])
    from outrider.verify.sampling import device  # imports torch

    choices = device.choices(logits[:], params, positions, extra, together)

    def decision() -> Decision:
        chosen, probabilities, *others = choices.arrays()
        path, tokens = walk(tree, chosen.tolist().__getitem__)
        check_finite(probabilities[[0, *(path + 1)]])  # not a number if the largest logit is not finite
        return path, tokens, others

    return decision


def walk(tree: DraftTree, choose: Callable[[int], int]) -> tuple[Ints, Ints]:
    """Descends while the target's token, `choose(0)` at the root and `choose(i + 1)` at node i, is a child.

    Chooses only at the nodes that it reaches. Returns the accepted path (nodes, int32 [A]) and the emitted tokens
    (int32 [A+1]). They are the tokens of plain decoding, since the target chose each of them after accepted tokens only.
    """
    path: list[int] = []
    tokens = [choose(0)]
    node = tree.child(-1, tokens[0])
    while node is not None:
        path.append(node)
        tokens.append(choose(node + 1))
        node = tree.child(node, tokens[-1])
    return np.array(path, np.int32), np.array(tokens, np.int32)


def _reject(
    params: SamplingParams, logits: NodeLogits, tree: DraftTree, first: int, extra: Sequence[Any], together: Together | None
) -> Callable[[], Decision]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192), applied recursively to siblings.

    Of a node's children, those that were sampled are judged first, in sampling order, and then the guesses.
    """
    if is_on_host(logits):
        return lambda: (*_descend_all(params, logits, tree, first, distribution), [*extra])
    from outrider.verify.model.transfer import Download  # imports torch
    from outrider.verify.sampling import device

    others = Download(*extra, shared=None if together is None else together.copy)
    return lambda: (*_descend_all(params, logits, tree, first, device.distribution), others.arrays())


def _descend_all(
    params: SamplingParams, logits: NodeLogits, tree: DraftTree, first: int, probabilities: Probabilities
) -> tuple[Ints, Ints]:
    """The accepted path and the emitted tokens. Reads the logits of the path, and waits for each of its rows."""
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        target = probabilities(logits[node + 1], params)
        proposal = _proposed(tree, node, tokens)
        position = first + len(path)
        count = len(proposal.drawn) + len(proposal.guesses)
        noise = [uniform(params.seed, position, number) for number in range(count + 1)]
        accepted, token = descend(target, proposal.q, proposal.drawn, proposal.guesses, noise)
        tokens.append(token)
        child = None if accepted is None else proposal.nodes[accepted]
        if child is None:
            return np.array(path, np.int32), np.array(tokens, np.int32)
        node = child
        path.append(node)


class Proposal(NamedTuple):
    """The tokens that a draft proposes after one node."""

    q: NDArray[np.float64] | None  # [V]; the distribution of the sampled tokens
    drawn: list[int]  # sampled tokens, in sampling order
    guesses: list[int]  # the other tokens
    nodes: list[int | None]  # nodes of `drawn` and `guesses`; None = sampled while the target ran, and not in the tree


def _proposed(tree: DraftTree, node: int, path: Sequence[int]) -> Proposal:
    """The proposal after a node, at the end of the tokens `path`."""
    children: list[int] = np.flatnonzero(tree.parents == node).tolist()
    nodes: list[int | None] = []
    if (draws := tree.draws.get(node)) is not None:
        nodes, drawn, q = [*draws.rows], tree.tokens[list(draws.rows)].tolist(), draws.q.astype(np.float64)
    elif tree.continuation is not None and (found := tree.continuation(path)) is not None:
        nodes, drawn, q = [tree.child(node, found[0])], [found[0]], found[1].astype(np.float64)
    else:
        drawn, q = [], None
    guesses = [child for child in children if child not in nodes]
    return Proposal(q, drawn, tree.tokens[guesses].tolist(), [*nodes, *guesses])


def descend(
    target: NDArray[np.float64],  # [V]; the target's distribution
    proposal: NDArray[np.float64] | None,  # [V]; q, the distribution of the sampled children; None without any
    drawn: Sequence[int],  # tokens of the children that were sampled without replacement, in sampling order
    guesses: Sequence[int],  # tokens of the other children
    noise: Sequence[float],  # uniform in [0, 1): one number per child, and one for the residual
) -> tuple[int | None, int]:
    """The accepted child's index and token, or None and a token sampled from the residual distribution.

    A sampled child x is accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes max(p - q, 0) and x is
    removed from q, both renormalised. A guess x is then accepted with probability p(x), which is the same rule for q(x) = 1;
    it may depend on the samples, because p is what their rejection has left. The token has p > 0.
    """
    residual, q = target, proposal
    for index, token in enumerate(drawn):
        assert q is not None
        if noise[index] * q[token] < residual[token]:
            return index, token
        residual = _renormalized(np.maximum(residual - q, 0.0), residual)
        q = q.copy()
        q[token] = 0.0
        q /= max(q.sum(), 1e-300)
    for index, token in enumerate(guesses, start=len(drawn)):
        if noise[index] < residual[token]:
            return index, token
        rest = residual.copy()
        rest[token] = 0.0
        residual = _renormalized(rest, residual)
    return None, sample(residual, noise[-1])


def _renormalized(weights: NDArray[np.float64], fallback: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights [V] with sum 1; the fallback if none is left, because p equals q up to rounding."""
    mass = weights.sum()
    return weights / mass if mass > 0.0 else fallback


def sample(weights: NDArray[np.float64], number: float) -> int:
    """A token sampled in proportion to `weights` [V] by inverse CDF, from a `number` in [0, 1). Its weight is positive."""
    mass = np.cumsum(weights)
    last = np.searchsorted(mass, mass[-1], "left")  # where the product below is rounded up to the total
    return int(min(last, np.searchsorted(mass, number * mass[-1], "right")))
