"""The texts of principals' earlier sessions, from which their later ones draft.

Each principal's texts have an index of bounded size, which no other principal's drafts read. Drafts change no answer, so
neither does what was learned.
"""

from __future__ import annotations

from collections import OrderedDict

from outrider.drafters.library.learned import LearnedText

# Texts of at most this many principals are kept. The least recently used one is dropped first.
MAX_PRINCIPALS = 256


class LearnedTexts:
    """The texts of all principals."""

    def __init__(self, max_tokens: int, separator: int) -> None:
        """`max_tokens` is the bound for each principal."""
        self._max_tokens = max_tokens
        self._separator = separator
        self._by_principal: OrderedDict[str, LearnedText] = OrderedDict()  # least recently used principal first

    def of(self, principal: str) -> LearnedText:
        """The texts of a principal."""
        if principal not in self._by_principal:
            self._by_principal[principal] = LearnedText(self._max_tokens, self._separator)
        self._by_principal.move_to_end(principal)
        if len(self._by_principal) > MAX_PRINCIPALS:
            self._by_principal.popitem(last=False)
        return self._by_principal[principal]
