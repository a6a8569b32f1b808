"""Sessions: what a program that is no server needs of the drafters."""

import copy
import ctypes
import io
import subprocess
import sys
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints
from outrider.drafters.library import Keyed, Options, Resources, Session, index_texts
from outrider.drafters.library.session import TREE_PER_CHAIN
from outrider.drafters.native import library
from outrider.drafters.native.library import structure
from outrider.drafters.options import TableName, TrigramOptions
from outrider.drafters.tables.automaton import append, new_automaton

VOCABULARY = 50
RESOURCES = Resources(vocabulary=VOCABULARY)
DRAFTERS = get_args(TableName)
ROUND = np.tile(np.arange(3, 15, dtype=np.int32), 4)
# A target that nearly always repeats itself after 12 tokens.
ANSWER = np.concatenate([ROUND, [30], ROUND, [31, 32], ROUND]).astype(np.int32)


def verify(tree: DraftTree, rest: Ints, feedback: int) -> tuple[Ints, Ints, Any]:
    """The step's tokens of a target whose answer goes on with `rest`, and its likeliest tokens at every node."""
    accepted = tree.follow(rest[:-1])
    ids = np.tile(np.arange(feedback, dtype=np.int32), (len(tree) + 1, 1))
    if feedback:
        ids[0, 0] = rest[0]
        for place, row in enumerate(accepted):
            ids[row + 1, 0] = rest[place + 1]
    return rest[: len(accepted) + 1], ids, np.full(ids.shape, 0.9 / max(1, feedback), np.float32)


def decode(session: Session, chain: bool, prompt: Ints = ROUND[:20]) -> int:
    """The steps of ANSWER after a prompt."""
    session.begin(prompt, prediction=ANSWER)
    done = steps = 0
    while done < len(ANSWER) - 1:
        tree = session.propose_chain(6) if chain else session.propose(12)
        tokens, ids, probs = verify(tree, ANSWER[done:], session.feedback)
        session.observe(tokens, ids, probs)
        done, steps = done + len(tokens), steps + 1
    assert session.tokens.tolist() == [*prompt.tolist(), *ANSWER[:done].tolist()]
    session.end()
    return steps


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_drafter_decodes_with_trees_and_chains(drafter: str) -> None:
    for chain in (False, True)[: 1 if drafter == "lookahead" else 2]:
        steps = decode(Session(drafter, RESOURCES), chain)
        assert (steps < 0.7 * len(ANSWER)) == (drafter not in ("none", "retrieval"))


def test_a_chain_is_the_likeliest_path_of_a_tree() -> None:
    session = Session("fusion", RESOURCES)
    session.begin(ANSWER)
    tree = session.propose(5 * TREE_PER_CHAIN)
    chain = session.propose_chain(5)
    assert chain.tokens.tolist() == tree.likeliest(())[:5]
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
    assert len(session.propose_chain(5, least=float(chain.probability[2]))) == 3


def test_a_drafter_without_chains_says_so() -> None:
    session = Session("lookahead", RESOURCES)
    session.begin(ROUND)
    with pytest.raises(ValueError, match="propose trees"):
        session.propose_chain(4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_a_program_that_passes_the_whole_text_drafts_the_same(sizes: list[int], first: int) -> None:
    observed, read = Session("fusion", RESOURCES), Session("fusion", RESOURCES)
    observed.begin(ANSWER[:first])
    read.read(ANSWER[:first])
    for size in sizes:
        end = min(len(ANSWER), first + size)
        trees = [session.propose(8).tokens.tolist() for session in (observed, read)]
        assert trees[0] == trees[1]
        observed.observe(ANSWER[first:end])
        read.read(ANSWER[:end])
        first = end
        if first == len(ANSWER):
            return


def chains(session: Session) -> list[list[int]]:
    """What a session drafts along ROUND, 7 tokens at a time."""
    session.begin(ROUND[:2])
    found = []
    for start in range(2, len(ROUND), 7):
        found.append(session.propose_chain(6).tokens.tolist())
        session.observe(ROUND[start : start + 7])
    session.end()
    return found


@pytest.mark.parametrize("drafter", ["fusion", "trigram", "lookup"])
def test_a_saved_session_goes_on_as_the_session_would(drafter: str) -> None:
    session = Session(drafter, RESOURCES)
    decode(session, chain=False)
    file = io.BytesIO()
    arrays: dict[str, Any] = session.state()
    np.savez(file, **arrays)
    file.seek(0)
    with np.load(file) as saved:
        restored = Session(drafter, RESOURCES, dict(saved))
    copied = copy.deepcopy(session)
    expected = chains(session)
    assert chains(restored) == chains(copied) == expected
    assert chains(Session(drafter, RESOURCES)) != expected


def test_an_unknown_drafter_is_named() -> None:
    with pytest.raises(ValueError, match="There is no drafter 'fusoin' here; choose one of none, trigram"):
        Session("fusoin", RESOURCES)
    with pytest.raises(ValueError, match="There is no drafter 'pearl' here"):  # it needs a draft model
        Session("pearl", RESOURCES)


def test_keyed_noise_is_known_to_the_drafter() -> None:
    sampling = Keyed(seed=3)
    flat = np.zeros(VOCABULARY, np.float32)
    chosen = [sampling.choose(flat, position) for position in range(200)]
    assert chosen == [Keyed(seed=3).choose(flat, position) for position in range(200)]
    assert len(set(chosen)) > VOCABULARY // 2
    excluded = np.where(np.arange(VOCABULARY) == 7, 0.0, -np.inf).astype(np.float32)
    assert sampling.choose(excluded, 4) == 7
    session = Session("fusion", RESOURCES)
    hits = 0
    for position in range(100):  # the first draft of answers that begin at random
        sampling = Keyed(seed=position)
        session.begin([1, 2, 3, 4, 49], sampling=sampling)
        hits += sampling.choose(flat, 0) in session.propose(12).tokens
    assert hits > 50  # 12 of 50 tokens, without the noise


def test_it_imports_neither_torch_nor_the_server() -> None:
    program = (
        "import sys; from outrider.drafters.library import Session; Session()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'pydantic') "
        "or name.startswith(('outrider.server', 'outrider.verify'))])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_options_and_corpora_are_shared() -> None:
    texts = Resources(vocabulary=VOCABULARY, corpus=[index_texts([[40, 41, 42, 43, 44]] * 3, VOCABULARY)])
    session = Session("fusion", texts)
    session.begin([40, 41])
    assert session.propose_chain(3).tokens.tolist() == [42, 43, 44]
    shallow = Session("trigram", Resources(Options(trigram=TrigramOptions(depth=2)), vocabulary=VOCABULARY))
    shallow.begin(ANSWER)
    assert shallow.propose(16).depths.max() == 2


@pytest.mark.parametrize("tokens", [np.zeros(4, np.int64), np.zeros(8, np.int32)[::2]])
def test_arrays_of_other_types_and_layouts_are_refused(tokens: NDArray[np.int32]) -> None:
    with pytest.raises(TypeError, match="needs a contiguous array of int32"):
        append(new_automaton(64), tokens)


def test_a_library_of_other_sources_is_refused() -> None:
    with pytest.raises(ImportError, match="compiled from other sources; install the package again"):

        @structure
        class Nodes(NamedTuple):
            tokens: NDArray[np.int32]

    with pytest.raises(ImportError, match="compiled from other sources"):
        library.symbol("no_such_function", ctypes.c_void_p)


def test_without_the_library_only_calls_fail() -> None:
    program = """
import ctypes, pathlib
pathlib.Path.glob = lambda *_: []
from outrider.drafters.registry import Resources, make
make("prediction", Resources())
try:
    make("lookup", Resources())
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [library.MISSING]
