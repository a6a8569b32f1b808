"""Every name creates a drafter that implements the protocol, and whose tables can be saved and restored."""

from dataclasses import replace

import numba
import numpy as np
import pytest

from outrider.drafters.interface import NOTHING, Verdict
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.options import NAMES, NEED_A_MODEL, DrafterName, Options, PearlOptions
from outrider.drafters.pearl import PearlDrafter
from outrider.drafters.registry import Resources, arrays_of, fork, make, restore, warm
from outrider.drafters.sequence import Sequence
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check

RESOURCES = Resources(model=lambda: ToyModel(np.full((8, 8), 1 / 8)))


@pytest.mark.parametrize("name", NAMES)
def test_each_drafter_implements_the_protocol(name: DrafterName) -> None:
    drafter = Driven(make(name, RESOURCES))
    for _ in range(2):
        drafter.begin(np.array([1, 2, 3, 1, 2], np.int32))
        tree = drafter.propose(16)
        check(tree)
        assert len(tree) <= 16
        drafter.observe(Verdict(tree, np.empty(0, np.int32), np.array([3, 1, 2], np.int32)))
        check(drafter.propose(16))
        drafter.end()


def test_warming_up_leaves_no_learned_state() -> None:
    warm(RESOURCES)
    drafter = Driven(make("trigram", Resources()))
    drafter.begin(np.array([0, 1], np.int32))
    assert len(drafter.propose(8)) <= 1


def test_drafters_that_need_a_model_are_listed_only_with_one() -> None:
    assert set(NAMES) - set(Resources().names) == {"draft", "draft-tree", "draft-graph", "pearl"}
    assert RESOURCES.names == NAMES


def test_pearl_drafts_beside_tables_unless_an_option_asks_for_the_papers_algorithm() -> None:
    assert isinstance(make("pearl", RESOURCES), UnionDrafter)
    for options in (PearlOptions(thrifty=False), PearlOptions(pre_verify=False), PearlOptions(post_verify=False)):
        assert isinstance(make("pearl", replace(RESOURCES, options=Options(pearl=options))), PearlDrafter)


def test_drafters_measure_the_draft_model_apart() -> None:
    """Beside other tables, it pays in other steps."""
    pearl, other, fusion = make("pearl", RESOURCES), make("pearl", RESOURCES), make("fusion", RESOURCES)
    assert vars(pearl)["_schedules"] is vars(other)["_schedules"]
    assert vars(pearl)["_schedules"] is not vars(fusion)["_schedules"]


TABLE_DRAFTERS: list[DrafterName] = ["trigram", "lookup", "lookahead", "fusion", "retrieval", "prediction", "none"]


@pytest.mark.parametrize("name", TABLE_DRAFTERS)
def test_a_restored_drafter_proposes_the_same(name: DrafterName) -> None:
    rng = np.random.default_rng(0)
    text = np.tile(rng.integers(0, 50, 30), 3).astype(np.int32)
    resources = Resources(vocabulary=64)
    learned, sequence = make(name, resources), Sequence(text)
    learned.begin(sequence)
    for _ in range(5):
        tree = learned.propose(8)
        ids = rng.integers(0, 50, (len(tree) + 1, learned.feedback)).astype(np.int32)
        verdict = Verdict(
            tree, np.empty(0, np.int32), ids[:1, 0] if learned.feedback else text[:1], ids, np.full(ids.shape, 0.1, np.float32)
        )
        sequence.append(verdict.tokens)
        learned.observe(verdict)
    learned.end()
    saved = {key: array.copy() for key, array in arrays_of(learned).items()}
    restored, copied = make(name, resources), Sequence(sequence.tokens.copy())
    restored.begin(copied)
    restored.end()
    restore(restored, saved)
    longer = np.concatenate([sequence.tokens, text[:7]])
    sequence.begin(longer)
    copied.begin(longer)
    learned.begin(sequence)
    restored.begin(copied)
    ours, theirs = learned.propose(16), restored.propose(16)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.parents.tolist() == theirs.parents.tolist()


@pytest.mark.parametrize("name", [*NEED_A_MODEL, "fusion"])
def test_a_request_with_a_draft_model_leaves_arrays_of_fixed_shapes(name: DrafterName) -> None:
    """What is learned cannot be restored if the arrays depend on the last draft."""
    random = np.random.default_rng(0)
    resources = Resources(model=lambda: ToyModel(np.full((8, 8), 1 / 8), random))
    used, fresh = Driven(make(name, resources)), Driven(make(name, resources))
    for drafter in (used, fresh):
        drafter.begin(np.array([1, 2, 3, 1, 2], np.int32))
    for _ in range(2):
        used.observe(Verdict(used.propose(16), NOTHING, np.array([3, 1, 2], np.int32)))
    used.propose(16)
    for drafter in (used, fresh):
        drafter.end()
    shapes = [{key: array.shape for key, array in arrays_of(drafter.drafter).items()} for drafter in (used, fresh)]
    assert shapes[0] == shapes[1]


def test_arrays_of_another_shape_are_left_out() -> None:
    small, large = (make("trigram", Resources()) for _ in range(2))
    saved = {key: array[:0] for key, array in arrays_of(small).items()}
    before = {key: array.copy() for key, array in arrays_of(large).items()}
    restore(large, saved)
    restore(large, {})
    assert before and all((arrays_of(large)[key] == array).all() for key, array in before.items())


@pytest.mark.parametrize("name", TABLE_DRAFTERS)
def test_a_fork_needs_no_other_kernels(name: DrafterName) -> None:
    """Its arrays have the types that the kernels are compiled for."""
    drafter = make(name, Resources(vocabulary=64))
    drafter.begin(Sequence(np.arange(9, dtype=np.int32)))
    copied = fork(drafter, {})
    for attribute, value in vars(drafter).items():
        if isinstance(value, tuple | np.ndarray):
            assert numba.typeof(getattr(copied, attribute)) == numba.typeof(value), attribute
    assert arrays_of(copied).keys() == arrays_of(drafter).keys()
    assert not {id(array) for array in arrays_of(copied).values()} & {id(array) for array in arrays_of(drafter).values()}
