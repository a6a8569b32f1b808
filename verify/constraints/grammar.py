"""Structured output with llguidance: the tokens that a grammar allows at each node of a draft tree.

A node's mask is the one plain decoding would have there, so constrained answers do not depend on drafts: each node has a copy
of its parent's matcher, because a matcher of llguidance that has been rolled back can compute the masks of another text. Tokens
that the grammar forces become a draft. Knows nothing about logits.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import llguidance
import numpy as np
from llguidance import LLMatcher, TokenizerWrapper
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints, Source, chain
from outrider.verify.constraints.limits import LIMITS, first_line
from outrider.verify.constraints.mask_time import MaskTime
from outrider.verify.fast_tokenizer import AnyTokenizer

log = logging.getLogger("outrider.worker")

MAX_CACHED_GRAMMARS = 64
# The times of the clients that sent a grammar last.
MAX_PRINCIPALS = 256
TOO_EXPENSIVE = "The grammar is too expensive to evaluate; simplify it: each token takes too long"

# llguidance stops a matcher for these reasons, or with an error that begins so, if the grammar exceeds LIMITS.
TOO_COMPLEX = frozenset({"LexerTooComplex", "ParserTooComplex"})
LEXER_ERROR = "lexer error"


class GrammarError(ValueError):
    """The grammar cannot be compiled, or is too expensive to follow; the message says why."""


class MatcherError(RuntimeError):
    """The matcher has failed on a text that it allows, which is no fault of the client."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer; caches the most recently used."""

    def __init__(self, tokenizer: AnyTokenizer, vocabulary: int, stop_ids: Collection[int]) -> None:
        """`stop_ids` may end an answer. `vocabulary` is the number of the model's logits, and of a mask's entries."""
        self._tokenizer: Any = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._wrapped: Any = None  # created on first use: a large vocabulary takes a second
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._times: OrderedDict[str, MaskTime] = OrderedDict()  # by principal, the latest last

    def compile(self, grammar: str, open_ended: bool = False, principal: str | None = None) -> Grammar:
        """The grammar (in llguidance's serialised form) of a new answer; `open_ended` as in `Grammar`. Raises GrammarError.

        All answers of a principal share its time for masks.
        """
        mask_time = MaskTime() if principal is None else self._time_of(principal)
        digest = hashlib.blake2b(grammar.encode(), digest_size=16).hexdigest()
        if mask_time.refuses(digest):
            raise GrammarError(TOO_EXPENSIVE)
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
        return Grammar(matcher, self._vocabulary, self._stop_ids, open_ended, mask_time=mask_time, digest=digest)

    def _time_of(self, principal: str) -> MaskTime:
        found = self._times.setdefault(principal, MaskTime())
        self._times.move_to_end(principal)
        if len(self._times) > MAX_PRINCIPALS:
            self._times.popitem(last=False)
        return found

    def _wrap(self) -> Any:
        if hasattr(self._tokenizer, "token_bytes"):
            return llguidance.LLTokenizer(TokenizerWrapper(_TokenBytes(self._tokenizer, self._vocabulary, self._stop_ids)))
        ends = self._stop_ids or self._tokenizer.eos_token_id
        if ends is None or not hasattr(self._tokenizer, "backend_tokenizer"):
            raise GrammarError("Structured output needs a fast tokenizer with an EOS token.")
        backend = copy.deepcopy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=self._vocabulary, eos_token=ends)


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
    """The matcher state of one answer. Implements `Constraint`."""

    def __init__(
        self,
        start: LLMatcher,
        vocabulary: int,
        stop_ids: Collection[int],
        open_ended: bool = False,
        mask_time: MaskTime | None = None,
        digest: str = "",
    ) -> None:
        """`start` is a matcher before the first token; it stays as it is. `mask_time` is that of all answers of the client,
        which knows the grammar by `digest`.

        With `open_ended`, any token is allowed where the grammar may end; one that the grammar does not allow ends the answer.
        """
        self._clock = time.thread_time  # so that other programs make no grammar slow
        self._time, self._digest = mask_time or MaskTime(), digest
        self._start = start
        self._matcher = start.deep_copy()
        self._text: list[int] = []  # committed tokens without stop tokens
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(stop_ids)
        self._open_ended = open_ended

    def visit(self, draft: DraftTree, depth: int) -> tuple[DraftTree, NDArray[np.bool_]]:
        """The nodes of `draft` that the grammar allows, or a chain of up to `depth` forced tokens; and masks [N+1, V].

        Row 0 masks the token after the last committed one, row i+1 the token after node i. Nodes are left out once the client's
        masks have taken their time. Raises GrammarError if those of the roots alone do.
        """
        started, left = self._clock(), self._time.left
        forced = self._matcher.compute_ff_tokens()[:depth]
        if forced:
            draft = chain(np.array(forced, np.int32), np.ones(len(forced), np.float32), Source.GRAMMAR)
        matchers = [self._matcher]
        masks = [self._root_mask()]
        if not self._time.allows_root(self._clock() - started):  # too many slow ones
            self._time.refuse(self._digest)
            raise GrammarError(TOO_EXPENSIVE)
        allowed = np.zeros(len(draft), np.bool_)
        row_of = {-1: 0}  # allowed node to its row in `matchers` and `masks`
        for node, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
            if parent not in row_of or not masks[row_of[parent]][token] or token in self._stop_ids:
                continue  # verifying a stop token gains nothing, since no token follows it
            if self._clock() - started > left:
                break
            matcher = matchers[row_of[parent]].deep_copy()
            if not matcher.consume_token(token) or (mask := self._mask(matcher)) is None:
                continue  # the root of a later step fails here, or does not
            row_of[node] = len(masks)
            matchers.append(matcher)
            masks.append(mask)
            allowed[node] = True
        self._time.spend(self._clock() - started)
        return draft.keep(allowed), self._opened(np.stack(masks), matchers)

    def commit(self, tokens: Ints) -> bool:
        """Advances by emitted tokens, int32 [A]; stop tokens are skipped. Returns whether the last one ends an open answer.

        Raises GrammarError and MatcherError.
        """
        text = [token for token in tokens.tolist() if token not in self._stop_ids]
        last = text.pop() if self._open_ended and text else None
        self._advance(text)
        if last is None:
            return False
        if self._matcher.is_accepting() and not self._matcher.validate_tokens([last]):
            return True
        self._advance([last])
        return False

    def _advance(self, text: list[int]) -> None:
        """Commits tokens. A matcher that fails is replaced once. Raises GrammarError and MatcherError."""
        self._text += text
        if not self._matcher.consume_tokens(text):
            self._restart()

    def _restart(self) -> None:
        """Replaces the matcher by one that has read the committed text. Raises GrammarError and MatcherError."""
        if is_too_complex(self._matcher):
            self._fail()
        log.warning("the matcher of a grammar has failed, and is replaced")
        self._matcher = self._start.deep_copy()
        if not self._matcher.consume_tokens(self._text):
            self._fail()

    def _root_mask(self) -> NDArray[np.bool_]:
        """The mask after the committed text. Raises GrammarError and MatcherError."""
        mask = self._mask(self._matcher)
        if mask is None:
            self._restart()
            mask = self._mask(self._matcher)
        if mask is None:
            self._fail()
        return mask

    def _fail(self) -> NoReturn:
        """Raises GrammarError if the grammar is too expensive, else MatcherError."""
        if is_too_complex(self._matcher):
            reason = first_line(self._matcher.get_error())
            raise GrammarError(f"The grammar is too expensive to evaluate; simplify it: {reason}")
        raise MatcherError("the matcher of a grammar refuses a text that it has allowed")

    def _mask(self, matcher: LLMatcher) -> NDArray[np.bool_] | None:
        """The tokens that a matcher allows, bool [V]; None if it fails."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return None
        mask = np.unpackbits(bits, count=min(8 * len(bits), self._vocabulary), bitorder="little").astype(np.bool_)
        return np.pad(mask, (0, self._vocabulary - len(mask)))

    def _opened(self, masks: NDArray[np.bool_], matchers: Sequence[LLMatcher]) -> NDArray[np.bool_]:
        """The masks [N+1, V], which allow all tokens where an open answer may end."""
        if self._open_ended:
            masks[[matcher.is_accepting() for matcher in matchers]] = True
        return masks


def is_too_complex(matcher: LLMatcher) -> bool:
    """Whether a matcher has failed because its grammar is too expensive."""
    return matcher.stop_reason() in TOO_COMPLEX or matcher.get_error().startswith(LEXER_ERROR)
