"""The text of a session's current request: the only owner of its tokens.

The verifier appends to it and truncates it; drafters only read it. Knows nothing about drafts, models or text.
"""

import copy
from collections.abc import Collection
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length"]
Ints = NDArray[np.int32]
UNLIMITED = 1 << 30
# This many -1 entries precede the first token, so that a short context is also a view.
PADDING = 4


class Sequence:
    """The tokens of a request, prompt first, in a growing buffer. All requests of a session use one Sequence, in turn.

    Arrays are returned as views into the buffer: callers must not write to them, nor keep them across `begin`.
    """

    def __init__(self, prompt: Ints | None = None, max_tokens: int = UNLIMITED, stop_ids: Collection[int] = ()) -> None:
        self._buffer = np.full(PADDING + 64, -1, np.int32)
        self._length = 0
        self._shared: list[int] = []  # for each request, the length of the prefix that it shares with the text before it
        self.begin(np.empty(0, np.int32) if prompt is None else prompt, max_tokens, stop_ids)

    def begin(self, prompt: Ints, max_tokens: int = UNLIMITED, stop_ids: Collection[int] = ()) -> None:
        """Replaces the text by `prompt` (int32 [P]). The answer ends after `max_tokens` tokens or at a token in `stop_ids`."""
        prompt = np.asarray(prompt, np.int32)
        shared = common_prefix(self.tokens, prompt)
        self._shared.append(shared)
        self._length = shared
        self._write(prompt[shared:])
        self.prompt_length = len(prompt)
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Ints:
        """Prompt and answer, int32 [P+A]."""
        return self._buffer[PADDING : PADDING + self._length]

    @property
    def answer(self) -> Ints:
        """The tokens emitted so far, int32 [A]."""
        return self.tokens[self.prompt_length :]

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return max(0, self._length - self.prompt_length)

    @property
    def remaining(self) -> int:
        """Tokens that the request may still emit."""
        return max(0, self.max_tokens - self.emitted)

    @property
    def finish(self) -> Finish | None:
        """Why the answer ended; None while it continues."""
        if self.emitted and int(self.tokens[-1]) in self.stop_ids:
            return "stop"
        return None if self.remaining else "length"

    def context(self, size: int, end: int | None = None) -> Ints:
        """The `size` <= PADDING tokens before position `end` (default: the end), int32 [size]; -1 before the first token."""
        stop = PADDING + (self._length if end is None else end)
        return self._buffer[stop - size : stop]

    def admits(self, tokens: Ints) -> int:
        """The number of `tokens` (int32 [A]) that the answer may take: up to its limit, or through the first stop token."""
        count = min(len(tokens), self.remaining)
        for i, token in enumerate(tokens[:count].tolist()):
            if token in self.stop_ids:
                return i + 1
        return count

    def append(self, tokens: Ints) -> None:
        """Adds emitted tokens, int32 [A]."""
        self._write(tokens)

    def truncate(self, length: int) -> None:
        """Drops all but the first `length` tokens."""
        self._length = min(self._length, length)
        self.prompt_length = min(self.prompt_length, length)

    def clone(self, length: int) -> Self:
        """Another text with the first `length` tokens of this one and its earlier requests."""
        other = copy.copy(self)
        other._buffer, other._shared = self._buffer.copy(), [*self._shared]
        other.truncate(length)
        return other

    @property
    def request(self) -> int:
        """The number of the current request, counted from 1."""
        return len(self._shared)

    def unchanged_since(self, request: int) -> int:
        """The length of the prefix that no request after `request` has changed."""
        return min(self._shared[request:], default=self._length)

    def _write(self, tokens: Ints) -> None:
        start = PADDING + self._length
        if start + len(tokens) > len(self._buffer):
            grown = np.full(2 * (start + len(tokens)), -1, np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start : start + len(tokens)] = tokens
        self._length += len(tokens)


class Reader:
    """Tracks which prefix of a session's text a component has already processed in earlier requests."""

    def __init__(self) -> None:
        self._sequence: Sequence | None = None
        self._request = 0
        self._most = UNLIMITED  # number of tokens that were processed before this reader was made

    @property
    def known(self) -> int:
        """The length of the text's prefix that has been processed and has not changed since."""
        return 0 if self._sequence is None else min(self._most, self._sequence.unchanged_since(self._request))

    def begin(self, sequence: Sequence) -> int:
        """Starts a request; returns the number of prompt tokens that need no processing."""
        known = self.known if sequence is self._sequence else 0
        self._sequence, self._request, self._most = sequence, sequence.request, UNLIMITED
        return known

    def resume(self, sequence: Sequence, known: int) -> None:
        """Continues as a reader that has processed the first `known` tokens of a session's text."""
        self._sequence, self._request, self._most = sequence, sequence.request, known


def common_prefix(left: Ints, right: Ints) -> int:
    """The length of the longest common prefix of two texts, int32 [N] and [M]."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
