"""The masks of a client's grammars share a time: nodes are left out, and slow roots end answers of that client only."""

import numpy as np
import pytest
from llguidance import LLMatcher

from outrider.drafters.interface import EMPTY, DraftTree, Source, chain
from outrider.verify.constraints.grammar import Grammar, GrammarCompiler, GrammarError
from outrider.verify.constraints.mask_time import MASKS_SECONDS, REFUSED_SECONDS, ROOTS_SECONDS, MaskTime
from tests.verify.constraints.test_grammar import LETTERS, SIZE, STOP, TOKENIZER, ids

AMBIGUOUS = LLMatcher.grammar_from_lark("start: s\ns: s s | w\nw: /[a-z ]/")


def long_chain(nodes: int) -> DraftTree:
    tokens = np.array(ids("a b c d e f g h " * nodes)[:nodes], np.int32)
    return chain(tokens, np.ones(nodes, np.float32), Source.PREDICTION)


class Ticks:
    """A clock of which each reading is later by some seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


class Rig:
    """Answers of clients, whose masks take a given time. Time passes when a test says so."""

    def __init__(self) -> None:
        self.clock, self.spent = Ticks(), Ticks()
        self.compiler = GrammarCompiler(TOKENIZER, SIZE, [STOP])

    def answer(self, principal: str, grammar: str = AMBIGUOUS) -> Grammar:
        self.compiler._times.setdefault(principal, MaskTime(self.clock))
        found = self.compiler.compile(grammar, principal=principal)
        found._clock = self.spent
        return found


def test_nodes_beyond_the_time_are_left_out() -> None:
    rig = Rig()
    grammar = rig.answer("alice")
    rig.spent.seconds = MASKS_SECONDS / 8
    tree, masks = grammar.visit(long_chain(20), 64)
    assert 0 < len(tree) < 10 and len(masks) == len(tree) + 1
    assert tree.tokens.tolist() == long_chain(20).tokens[: len(tree)].tolist()
    assert len(grammar.visit(long_chain(20), 64)[0]) == 0
    rig.clock.now += 1.0
    rig.spent.seconds = 0.0
    assert len(grammar.visit(long_chain(20), 64)[0]) == 20  # the matcher is where it was


def test_the_answers_of_a_client_share_its_time() -> None:
    rig = Rig()
    answers = [rig.answer(name) for name in ("alice", "alice", "alice", "bob")]
    rig.spent.seconds = MASKS_SECONDS / 8.5
    sizes = [len(each.visit(long_chain(20), 64)[0]) for each in answers]
    assert sizes[0] > 0 and sizes[1:] == [0, 0, sizes[0]]


def test_slow_roots_end_the_answers_of_one_client_and_their_grammar_is_refused_for_a_while() -> None:
    rig = Rig()
    alice, bob = ([rig.answer(name) for _ in range(3)] for name in ("alice", "bob"))
    rig.spent.seconds = ROOTS_SECONDS / 12
    steps = 0
    with pytest.raises(GrammarError, match="too expensive to evaluate"):
        while steps < 100:
            alice[steps % 3].visit(EMPTY, 64)
            steps += 1
    assert 10 <= steps <= 12  # of all three together
    with pytest.raises(GrammarError, match="too expensive to evaluate"):
        rig.answer("alice")
    rig.answer("alice", LETTERS)
    bob[0].visit(EMPTY, 64)
    rig.answer("bob")
    rig.clock.now += REFUSED_SECONDS
    rig.answer("alice").visit(EMPTY, 64)


def test_a_slow_root_now_and_then_ends_no_answer() -> None:
    rig = Rig()
    grammar = rig.answer("alice")
    rig.spent.seconds = ROOTS_SECONDS / 5
    for _ in range(50):
        allowed = grammar.visit(EMPTY, 64)[1]
        assert allowed.any()
        rig.clock.now += 2.0
