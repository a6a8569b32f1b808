"""Grammars and reasoning budgets over trees: each node has the mask of plain decoding, and a client's masks share a time."""

import json
import math
from dataclasses import replace
from random import Random
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from outrider import models
from outrider.drafters.interface import EMPTY, DraftTree, Source, chain
from outrider.drafters.registry import Resources, make
from outrider.verify.constraints.grammar import MAX_CACHED_GRAMMARS, Grammar, GrammarCompiler, GrammarError, MatcherError
from outrider.verify.constraints.mask_time import MASKS_SECONDS, REFUSED_SECONDS, ROOTS_SECONDS, MaskTime
from outrider.verify.constraints.reasoning import ReasoningBudget
from outrider.verify.model.backend import load_model
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import ReasoningLimit, SamplingParams
from outrider.verify.stream import DecodeOptions
from tests.decoding import answer_of
from tests.grammars import record
from tests.trees import trees

BYTES = LLTokenizer("byte")
TOKENIZER = AutoTokenizer.from_pretrained(models.TARGET)
STOP = int(TOKENIZER.eos_token_id)
SIZE = len(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER, SIZE, [STOP])
LETTERS = LLMatcher.grammar_from_regex("[a-f]{1,6}")
SCHEMA = LLMatcher.grammar_from_json_schema(
    record(name={"type": "string", "maxLength": 12}, age={"type": "integer", "minimum": 0, "maximum": 150}),
    overrides={"whitespace_flexible": False},
)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def test_forced_tokens_are_a_draft() -> None:
    grammar = COMPILER.compile(LLMatcher.grammar_from_lark('start: "import numpy as np" | "import numpy.linalg"'))
    tree, masks = grammar.visit(EMPTY, 64)
    assert TOKENIZER.decode(tree.tokens).startswith("import num")
    assert set(tree.source.tolist()) == {Source.GRAMMAR}
    assert all(masks[row][token] for row, token in enumerate(tree.tokens))
    assert len(grammar.visit(EMPTY, 2)[0]) <= 2


def test_a_stop_token_is_allowed_where_the_grammar_may_end_and_never_drafted() -> None:
    grammar = COMPILER.compile(LETTERS)
    assert not grammar.visit(EMPTY, 8)[1][0][STOP]
    grammar.commit(np.array(ids("a"), np.int32))
    tree, masks = grammar.visit(chain(np.array([STOP], np.int32), np.ones(1, np.float32), Source.TRIGRAM), 8)
    assert masks[0][STOP]
    assert not len(tree)


def test_an_invalid_grammar_is_the_clients_error_and_a_violated_one_is_not() -> None:
    with pytest.raises(GrammarError, match="compiled"):
        COMPILER.compile("nonsense")
    with pytest.raises(MatcherError):
        COMPILER.compile(LETTERS).commit(np.array(ids("z"), np.int32))


def test_a_grammar_that_exceeds_the_limits_is_the_clients_error() -> None:
    multiples = {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 10**30}
    grammar = COMPILER.compile(LLMatcher.grammar_from_json_schema(json.dumps(multiples)))
    with pytest.raises(GrammarError, match="too expensive"):
        grammar.visit(EMPTY, 8)


class Copies:
    """In the place of a matcher before the first token: its copies, some of which have failed."""

    def __init__(self, *fails: bool) -> None:
        self._fails = iter(fails)

    def deep_copy(self) -> LLMatcher:
        matcher = LLMatcher(BYTES, LETTERS, log_level=0)
        if next(self._fails):
            matcher.consume_token(ord("z"))
            assert matcher.is_error()
        return matcher


def test_a_matcher_that_fails_is_replaced_once() -> None:
    def grammar(*fails: bool) -> Grammar:
        return Grammar(cast(LLMatcher, Copies(*fails)), BYTES.vocab_size, [])

    def allowed(grammar: Grammar) -> set[str]:
        return {chr(byte) for byte in np.flatnonzero(grammar.visit(EMPTY, 0)[1][0])} & set("abcdefgz")

    assert allowed(grammar(True, False)) == set("abcdef")
    began = grammar(True, False)
    began.commit(np.array([ord(letter) for letter in "abcdef"], np.int32))
    assert allowed(began) == set()
    with pytest.raises(MatcherError):
        allowed(grammar(True, True))


JSON = LLMatcher.grammar_from_json_schema({"type": "object"}, overrides={"whitespace_flexible": False})
# Tokens that begin and end texts, keys, objects and arrays.
PUNCTUATION = [token for token in range(SIZE) if set(TOKENIZER.decode([token])) & set('{}[]",:')]


@settings(max_examples=30)
@given(st.lists(trees(vocabulary=len(PUNCTUATION), nodes=12), min_size=8), st.randoms(use_true_random=False))
def test_masks_do_not_depend_on_the_drafts_before(drafts: list[DraftTree], random: Random) -> None:
    """Drafts of nested JSON, most of which the text leaves: after each, the masks are those of a matcher that saw none."""
    grammar, text = COMPILER.compile(JSON), list[int]()
    for draft in drafts:
        tree, masks = grammar.visit(replace(draft, tokens=np.array(PUNCTUATION, np.int32)[draft.tokens]), 64)
        for row, mask in enumerate(masks, start=-1):
            alone = COMPILER.compile(JSON)
            alone.commit(np.array(text + (tree.path(row) if row >= 0 else []), np.int32))
            assert np.array_equal(mask, alone.visit(EMPTY, 0)[1][0])
        choices = [token for token in PUNCTUATION if masks[0][token]] or np.flatnonzero(masks[0]).tolist()
        if (token := random.choice(choices)) == STOP:
            break
        grammar.commit(np.array([token], np.int32))
        text.append(token)


def test_an_open_answer_ends_where_the_grammar_may_end_and_the_model_leaves_it() -> None:
    grammar = COMPILER.compile(LLMatcher.grammar_from_regex("[ad]b(,[ad]b)*"), open_ended=True)
    [a], [b], [z], [comma] = ids("a"), ids("b"), ids("z"), ids(",")
    tree, masks = grammar.visit(chain(np.array([a, b, z], np.int32), np.ones(3, np.float32), Source.TRIGRAM), 8)
    assert tree.tokens.tolist() == [a, b]
    assert not masks[0][z] and not masks[1][z]
    assert masks[2].all()
    assert not grammar.commit(np.array([a, b], np.int32))
    assert not grammar.commit(np.array([comma], np.int32))
    assert not grammar.visit(EMPTY, 8)[1][0][z]
    assert not grammar.commit(np.array([a], np.int32))
    assert grammar.commit(np.array([b, z], np.int32))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_model(LoadOptions(str(models.TARGET), dtype="float32"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_drafting_is_lossless_under_a_grammar(runner: ModelRunner, temperature: float, penalty: float) -> None:
    compiler = GrammarCompiler(TOKENIZER, runner.vocabulary, [STOP])
    prompt = np.array(ids("def person():\n    return "), np.int32)
    for seed in range(2):
        params = SamplingParams(temperature=temperature, seed=seed, frequency_penalty=penalty)
        options = DecodeOptions(params, 120, frozenset([STOP]))
        plain = answer_of(runner, prompt, options, None, compiler.compile(SCHEMA))
        answer = json.loads(TOKENIZER.decode(plain.tokens, skip_special_tokens=True))
        assert set(answer) == {"name", "age"}
        assert 0 <= answer["age"] <= 150
        for name in ("trigram", "lookahead", "fusion"):
            drafter = make(name, Resources(vocabulary=runner.vocabulary + 1))
            found = answer_of(runner, prompt, options, drafter, compiler.compile(SCHEMA))
            assert found.tokens == plain.tokens
            assert found.finish == plain.finish == "stop"


def test_a_grammar_overrides_rules_that_exclude_all_its_tokens(runner: ModelRunner) -> None:
    compiler = GrammarCompiler(TOKENIZER, runner.vocabulary, [STOP])
    letter = ids("a")[0]
    params = SamplingParams(temperature=0, logit_bias={letter: -math.inf}, min_tokens=5)
    options = DecodeOptions(params, 8, frozenset([STOP]))
    grammar = compiler.compile(LLMatcher.grammar_from_regex("a"))
    found = answer_of(runner, np.array([5, 6], np.int32), options, None, grammar)
    assert found.tokens == [letter, STOP]


def test_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(TOKENIZER, SIZE, [STOP])
    for number in range(MAX_CACHED_GRAMMARS + 5):
        compiler.compile(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == MAX_CACHED_GRAMMARS


VOCABULARY, OPENING, CLOSING = 8, 0, 1


def after(limit: ReasoningLimit, tokens: list[int]) -> ReasoningBudget:
    budget = ReasoningBudget(limit, VOCABULARY)
    budget.commit(np.array(tokens, np.int32))
    return budget


def is_forced(budget: ReasoningBudget) -> bool:
    """Whether only the closing token is allowed."""
    _, allowed = budget.visit(EMPTY, 0)
    assert allowed is None or allowed[0].tolist() == [token == CLOSING for token in range(VOCABULARY)]
    return allowed is not None


@given(trees(vocabulary=VOCABULARY, nodes=12), st.integers(0, 4), st.sampled_from([None, OPENING]))
def test_every_mask_is_that_of_its_path(tree: DraftTree, max_tokens: int, opening: int | None) -> None:
    limit = ReasoningLimit(max_tokens, CLOSING, opening)
    visited, allowed = ReasoningBudget(limit, VOCABULARY).visit(tree, 64)
    assert visited is tree
    for row in range(-1, len(tree)):
        path = tree.path(row) if row >= 0 else []
        masked = allowed is not None and not allowed[row + 1].all()
        assert masked == is_forced(after(limit, path))


@pytest.mark.parametrize(
    ("limit", "tokens", "forced"),
    [
        (ReasoningLimit(2, CLOSING), [5], False),
        (ReasoningLimit(2, CLOSING), [5, 6], True),
        (ReasoningLimit(2, CLOSING), [5, 6, CLOSING], False),
        (ReasoningLimit(2, CLOSING), [CLOSING, 5, 6], False),  # closed by the model
        (ReasoningLimit(0, CLOSING), [], True),
        (ReasoningLimit(2, CLOSING, OPENING), [OPENING, 5], False),
        (ReasoningLimit(2, CLOSING, OPENING), [OPENING, 5, 6], True),
        (ReasoningLimit(2, CLOSING, OPENING), [5, OPENING, 6, 7], False),  # the answer does not begin with reasoning
    ],
)
def test_only_the_closing_token_is_allowed_at_the_limit(limit: ReasoningLimit, tokens: list[int], forced: bool) -> None:
    assert is_forced(after(limit, tokens)) == forced


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
