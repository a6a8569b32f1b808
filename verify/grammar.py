"""Structured output: which tokens a grammar allows at each node of a draft tree, by llguidance.

Promises that a node's mask is the one plain decoding would have had there, so constrained answers are the same with drafts and
without. Tokens that the grammar forces become drafts of their own. Knows nothing about logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import llguidance.hf
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from drafters.interface import DraftTree, Ints, Source, chain
from verify.grammar_limits import LIMITS, first_line

KEPT = 64  # compiled grammars; the least recently used goes first


class GrammarError(ValueError):
    """The grammar cannot be followed; the message says why."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Collection[int]) -> None:
        """`stop_ids` are the tokens that may end an answer. Masks have `vocabulary` entries, the model's logits."""
        self._tokenizer: Any = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._wrapped: Any = None  # made when first needed: a large vocabulary takes a second
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> Grammar:
        """A grammar (as llguidance writes them down) at its beginning. Raises GrammarError."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            if self._wrapped is None:
                self._wrapped = self._wrap()
            matcher = LLMatcher(self._wrapped, grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarError(f"The grammar cannot be compiled: {first_line(matcher.get_error())}")
            self._compiled[grammar] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Grammar(matcher.deep_copy(), self._vocabulary, self._stop_ids)

    def _wrap(self) -> Any:
        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._stop_ids or None)
        except (ValueError, TypeError) as error:
            raise GrammarError(f"Structured output needs a fast tokenizer with an end token: {error}") from None


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(stop_ids)

    def visit(self, draft: DraftTree, depth: int) -> tuple[DraftTree, NDArray[np.bool_]]:
        """The part of a draft that the grammar allows, or what it forces, up to `depth` tokens; and its masks, [N+1, V].

        Row 0 is the mask of the last committed token's successor, row i+1 that of node i's.
        """
        forced = self._matcher.compute_ff_tokens()[:depth]
        if forced:
            draft = chain(np.array(forced, np.int32), np.ones(len(forced), np.float32), Source.GRAMMAR)
        masks = [self._mask()]
        chosen = np.zeros(len(draft), np.bool_)
        row_of = {-1: 0}  # of the nodes that are kept, their place in `masks`
        consumed = 0  # tokens that the matcher stands beyond the committed text: nodes come depth-first
        for node, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
            if parent not in row_of or not masks[row_of[parent]][token] or token in self._stop_ids:
                continue  # a stop token is never worth a row: nothing follows it
            above = int(draft.depths[node]) - 1
            if consumed > above:
                self._matcher.rollback(consumed - above)
            consumed = above + 1
            self._matcher.consume_token(token)
            row_of[node] = len(masks)
            masks.append(self._mask())
            chosen[node] = True
        if consumed:
            self._matcher.rollback(consumed)
        return draft.keep(chosen), np.stack(masks)

    def commit(self, tokens: Ints) -> None:
        """Takes emitted tokens (int32 [A]) in; a stop token ends the answer. Raises GrammarError outside the grammar."""
        text = [token for token in tokens.tolist() if token not in self._stop_ids]
        if not self._matcher.consume_tokens(text):
            raise GrammarError(f"The answer left its grammar: {self._matcher.get_error()}")

    def _mask(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"The grammar takes too much work: {first_line(self._matcher.get_error())}")
        mask = np.unpackbits(bits, count=min(8 * len(bits), self._vocabulary), bitorder="little").astype(np.bool_)
        return np.pad(mask, (0, self._vocabulary - len(mask)))
