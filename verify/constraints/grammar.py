"""Structured output with llguidance: the tokens that a grammar allows at each node of a draft tree.

A node's mask is the one plain decoding would have there, so constrained answers do not depend on drafts. Tokens that the
grammar forces become a draft. Knows nothing about logits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import llguidance.hf
import numpy as np
from llguidance import LLMatcher, TokenizerWrapper
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from outrider.drafters.interface import DraftTree, Ints, Source, chain
from outrider.verify.constraints.limits import LIMITS, first_line

MAX_CACHED_GRAMMARS = 64
# The masks of one step's nodes may take this processor time. An ordinary mask takes less than a millisecond.
MASKS_SECONDS = 0.02
# The answer ends after the mask of the root alone took longer in this many consecutive steps.
SLOW_ROOTS = 8


class GrammarError(ValueError):
    """The grammar cannot be compiled or followed; the message says why."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer; caches the most recently used."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Collection[int]) -> None:
        """`stop_ids` may end an answer. `vocabulary` is the number of the model's logits, and of a mask's entries."""
        self._tokenizer: Any = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._wrapped: Any = None  # created on first use: a large vocabulary takes a second
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> Grammar:
        """A matcher at the start of `grammar` (llguidance's serialised form). Raises GrammarError."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            if self._wrapped is None:
                self._wrapped = self._wrap()
            matcher = LLMatcher(self._wrapped, grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarError(f"The grammar cannot be compiled: {first_line(matcher.get_error())}")
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Grammar(matcher.deep_copy(), self._vocabulary, self._stop_ids)

    def _wrap(self) -> Any:
        if hasattr(self._tokenizer, "token_bytes"):
            return llguidance.LLTokenizer(TokenizerWrapper(_TokenBytes(self._tokenizer, self._vocabulary, self._stop_ids)))
        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._stop_ids or None)
        except (ValueError, TypeError) as error:
            raise GrammarError(f"Structured output needs a fast tokenizer with an EOS token: {error}") from None


class _TokenBytes:
    """A tokenizer that knows the bytes of its tokens, as `llguidance.TokenizerWrapper` takes it."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[bytes] = [*tokenizer.token_bytes[:vocabulary], *[b""] * (vocabulary - len(tokenizer.token_bytes))]
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *stop_ids})
        self.eos_token_id = stop_ids[0] if stop_ids else tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


class Grammar:
    """The matcher state of one answer."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: int,
        stop_ids: Collection[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock` measures processor time, so that other programs make no grammar slow."""
        self._clock = clock
        self._slow_roots = 0  # consecutive steps in which the root's mask was slow
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(stop_ids)

    def visit(self, draft: DraftTree, depth: int) -> tuple[DraftTree, NDArray[np.bool_]]:
        """The nodes of `draft` that the grammar allows, or a chain of up to `depth` forced tokens; and masks [N+1, V].

        Row 0 masks the token after the last committed one, row i+1 the token after node i. Nodes are left out once
        the masks have taken MASKS_SECONDS. Raises GrammarError if the root's mask alone does in SLOW_ROOTS steps in a row.
        """
        started = self._clock()
        forced = self._matcher.compute_ff_tokens()[:depth]
        if forced:
            draft = chain(np.array(forced, np.int32), np.ones(len(forced), np.float32), Source.GRAMMAR)
        masks = [self._mask()]
        self._judge_root(self._clock() - started)
        allowed = np.zeros(len(draft), np.bool_)
        row_of = {-1: 0}  # allowed node to its row in `masks`
        consumed = 0  # tokens that the matcher is ahead of the committed text; nodes are in depth-first order
        for node, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
            if parent not in row_of or not masks[row_of[parent]][token] or token in self._stop_ids:
                continue  # verifying a stop token gains nothing, since no token follows it
            if self._clock() - started > MASKS_SECONDS:
                break
            parent_depth = int(draft.depths[node]) - 1
            if consumed > parent_depth:
                self._matcher.rollback(consumed - parent_depth)
            consumed = parent_depth + 1
            self._matcher.consume_token(token)
            row_of[node] = len(masks)
            masks.append(self._mask())
            allowed[node] = True
        if consumed:
            self._matcher.rollback(consumed)
        return draft.keep(allowed), np.stack(masks)

    def _judge_root(self, seconds: float) -> None:
        """Counts slow masks of roots. Raises GrammarError."""
        self._slow_roots = self._slow_roots + 1 if seconds > MASKS_SECONDS else 0
        if self._slow_roots >= SLOW_ROOTS:
            raise GrammarError("The grammar is too expensive to evaluate; simplify it: each token takes too long")

    def commit(self, tokens: Ints) -> None:
        """Advances by emitted tokens, int32 [A]; stop tokens are skipped. Raises GrammarError if the grammar forbids one."""
        text = [token for token in tokens.tolist() if token not in self._stop_ids]
        if not self._matcher.consume_tokens(text):
            raise GrammarError(f"The answer violates its grammar: {first_line(self._matcher.get_error())}")

    def _mask(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(
                f"The grammar is too expensive to evaluate; simplify it: {first_line(self._matcher.get_error())}"
            )
        mask = np.unpackbits(bits, count=min(8 * len(bits), self._vocabulary), bitorder="little").astype(np.bool_)
        return np.pad(mask, (0, self._vocabulary - len(mask)))
