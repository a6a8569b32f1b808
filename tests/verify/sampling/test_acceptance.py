"""The walk accepts exactly the path of plain decoding; rejection emits tokens of the target's distribution only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Source, chain
from outrider.verify.errors import ModelError
from outrider.verify.sampling.acceptance import decide, descend, walk
from outrider.verify.sampling.rows import in_place
from outrider.verify.sampling_params import SamplingParams
from tests.slow import mostly_slow
from tests.trees import trees

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
Outcome = tuple[int | None, int]  # of `descend`


@given(trees(vocabulary=4, nodes=20), st.lists(st.integers(0, 3), min_size=21, max_size=21))
def test_walk_follows_the_targets_own_choices(tree: DraftTree, chosen: list[int]) -> None:
    rows, tokens = walk(tree, chosen.__getitem__)
    paths = {tuple(tree.path(row)): row for row in range(len(tree))}
    path: tuple[int, ...] = ()
    expected_rows = []
    token = chosen[0]
    while (*path, token) in paths:
        path = (*path, token)
        expected_rows.append(paths[path])
        token = chosen[paths[path] + 1]
    assert rows.tolist() == expected_rows
    assert tokens.tolist() == [*path, token]


def steps(function: Callable[[float], Outcome], low: float = 0.0, high: float = ALMOST_ONE) -> Iterator[tuple[Outcome, float]]:
    """The values of a step function on [low, high], each in one interval, with the intervals' lengths."""
    first, last = function(low), function(high)
    if first == last or high - low < 1e-10:
        yield first, high - low
        return
    middle = (low + high) / 2
    yield from steps(function, low, middle)
    yield from steps(function, middle, high)


def emitted(
    target: NDArray[np.float64], q: NDArray[np.float64] | None, drawn: Sequence[int], guesses: Sequence[int] = ()
) -> NDArray[np.float64]:
    """The distribution of the token that `descend` emits over these children, by integrating over all noise."""
    result, reached = np.zeros(len(target)), 1.0
    children = [*drawn, *guesses]
    for number in range(len(children) + 1):
        before = [ALMOST_ONE] * number  # rejects all earlier children that can be rejected
        after = [0.0] * (len(children) - number)

        def outcome(noise: float, before: list[float] = before, after: list[float] = after) -> Outcome:
            return descend(target, q, drawn, guesses, [*before, noise, *after])

        left = 1.0
        for (accepted, token), share in steps(outcome):
            if accepted is not None and accepted < number:
                return result  # that child is always accepted
            if number == len(children) or accepted == number:
                result[token] += reached * share
                left -= share
        reached *= left
    return result


shares = st.lists(st.integers(0, 8), min_size=4, max_size=4).filter(any).map(lambda counts: np.array(counts) / sum(counts))


@settings(max_examples=60)
@given(shares, shares, st.integers(1, 2), st.sampled_from(["any", "float32", "above"]), st.lists(st.integers(0, 3), max_size=3))
def test_emitted_tokens_have_the_targets_distribution(
    target: NDArray[np.float64], q: NDArray[np.float64], count: int, proposal: str, tokens: list[int]
) -> None:
    """Summed over all children that q can sample, beside guesses; q may also be the target rounded to float32, or up."""
    if proposal != "any":
        q = target.astype(np.float32).astype(np.float64)
    if proposal == "above":
        q = np.where(q > 0, np.nextafter(q.astype(np.float32), np.float32(2)), 0).astype(np.float64)
    assume(np.count_nonzero(q) >= count)
    total = np.zeros(4)
    for children in permutations(np.flatnonzero(q).tolist(), count):
        probability, remaining = 1.0, q / q.sum()
        for token in children:
            probability *= remaining[token] / remaining.sum()
            remaining = np.where(np.arange(4) == token, 0.0, remaining)
        guesses = [token for token in dict.fromkeys(tokens) if token not in children]
        total += probability * emitted(target, q, children, guesses)
    assert total == pytest.approx(target, abs=1e-6)


@given(shares, st.permutations(range(4)), st.integers(0, 4))
def test_deterministic_children_keep_the_distribution(target: NDArray[np.float64], order: list[int], count: int) -> None:
    assert emitted(target, None, (), order[:count]) == pytest.approx(target, abs=1e-8)


masses = st.sampled_from([0.0, 5e-324, 1e-310, 1e-46, 1e-40, 1e-30, 1e-16, 0.1, 0.3, 1.0])
numbers = st.one_of(st.sampled_from([0.0, 0.5, ALMOST_ONE]), st.floats(0, ALMOST_ONE))


@given(
    st.lists(masses, min_size=4, max_size=4).filter(any),
    st.one_of(st.none(), st.sampled_from(["equal", "above"]), st.lists(masses, min_size=4, max_size=4)),
    st.permutations(range(4)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.lists(numbers, min_size=5, max_size=5),
)
def test_an_emitted_token_is_never_excluded_or_beyond_the_vocabulary(
    weights: list[float], proposal: str | list[float] | None, order: list[int], counts: tuple[int, int], noise: list[float]
) -> None:
    target = np.array(weights)
    q = target if isinstance(proposal, str) else None if proposal is None else np.array(proposal)
    if proposal == "above":
        q = np.nextafter(target.astype(np.float32), np.float32(2)).astype(np.float64)
    sampled, count = (0 if q is None else min(counts)), max(counts)
    children = order[:count]
    accepted, token = descend(target, q, children[:sampled], children[sampled:], [*noise[:count], noise[-1]])
    assert 0 <= token < 4
    assert target[token] > 0
    assert accepted is None or children[accepted] == token


class OnDevice:
    """Logits that are on a device other than the CPU, as far as a rule can see."""

    device = torch.device("cuda")

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def __getitem__(self, rows: int | slice, /) -> torch.Tensor:
        return self._logits[rows]


SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=2, min_p=0.1),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("rule", ["keyed", "rejection"])
@pytest.mark.parametrize("sampling", mostly_slow(SAMPLINGS, SAMPLINGS[0], SAMPLINGS[-1]))
@pytest.mark.parametrize(
    ("value", "on_device"), [(torch.nan, False), (torch.inf, False), pytest.param(torch.nan, True, marks=pytest.mark.slow)]
)
def test_logits_that_are_not_finite_are_one_error_under_every_rule(
    value: float, rule: Literal["keyed", "rejection"], sampling: SamplingParams, on_device: bool
) -> None:
    """At the root, and at a node that is accepted; also where all are -inf."""
    if on_device:
        pytest.importorskip("triton")
    finite = torch.tensor([0.0, 100.0, 0.0], dtype=torch.bfloat16)
    one, all_excluded = finite.clone(), torch.full_like(finite, -torch.inf)
    one[2] = value
    tree = chain(np.array([1], np.int32), np.full(1, 0.5, np.float32), Source.LOOKUP)
    params = replace(sampling, rule=rule)
    for rows in ([one, finite], [finite, one], [finite, all_excluded]):
        logits = torch.stack(rows)
        with pytest.raises(ModelError, match="NaN or infinite"):
            decide(params, OnDevice(logits) if on_device else in_place(logits), tree, 0)()


def test_a_draft_model_that_computes_nan_changes_no_distribution() -> None:
    target = np.array([0.2, 0.3, 0.5])
    broken = np.full(3, np.nan)
    assert emitted(target, broken, [2]) == pytest.approx(target, abs=1e-8)
    assert emitted(target, broken, [2], [1]) == pytest.approx(target, abs=1e-8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
def test_logits_of_nodes_that_are_not_reached_do_not_matter() -> None:
    pytest.importorskip("triton")
    tree = chain(np.array([1], np.int32), np.full(1, 0.5, np.float32), Source.LOOKUP)
    logits = torch.tensor([[0.0, 0.0, 9.0], [torch.nan] * 3])
    for each in (logits.numpy(), OnDevice(logits)):
        assert decide(SamplingParams(temperature=0), each, tree, 0)()[1].tolist() == [2]
