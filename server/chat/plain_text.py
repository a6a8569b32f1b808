"""Encodes text without control tokens, whatever it contains.

Tokenizers can leave special tokens unrecognised, but not the other added tokens, some of which are markers all the same: those
of tool calls, or of fill-in-the-middle. Texts that spell such a marker are encoded in pieces.

While a chat template is rendered, marks stand for the special tokens in clients' text, so that none becomes a special token,
whatever the template puts around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from outrider.server.chat.fill_in import MARKERS
from outrider.server.chat.template import ChatTemplates

if TYPE_CHECKING:
    from outrider.verify.fast_tokenizer import AnyTokenizer

# SentencePiece writes a space as this character, which it may also put in front of a text.
SPACE = "\u2581"
ANCHOR = "\u263a"


class PlainText:
    """The encoder of text for one model. Any equal tokenizer can be passed to its methods."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        added = {str(token): int(id) for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        template = ChatTemplates(tokenizer).text
        self._puts_space_in_front = any(piece.startswith(SPACE) for piece in pieces_of(tokenizer, "x")[:1])
        # SentencePiece's unigram model finds special tokens in a text by itself.
        special = set(map(str, tokenizer.all_special_tokens)) - {str(tokenizer.unk_token)}
        known = [text for text in added if text in MARKERS or text in template or text in special]
        markers = [text for text in known if text.strip(f" \t\r\n{SPACE}")]
        spelled = {
            spelling
            for text in markers
            for spelling in (text, text.replace(SPACE, " "))  # a tokenizer may look for tokens after it has replaced spaces
            if added[text] in encode_plain(tokenizer, spelling)
        }
        self._markers = frozenset(added[text] for text in markers if len(text) > 1)
        longest_first = sorted(spelled, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def count_markers(self, text: str) -> int:
        """The number of markers that the text spells; each is at least one token."""
        return sum(1 for _ in self._pattern.finditer(text))

    def encode(self, tokenizer: AnyTokenizer, text: str, continues: bool = False) -> list[int]:
        """The ids of a text. If it `continues` another one, it gets no space in front."""
        start, ids = 0, list[int]()
        for found in self._pattern.finditer(text):
            cut = found.start() + 1  # the cut is inside the marker
            ids += self._encode(tokenizer, text[start:cut], continues or start > 0)
            start = cut
        return ids + self._encode(tokenizer, text[start:], continues or start > 0)

    def _encode(self, tokenizer: AnyTokenizer, text: str, continues: bool) -> list[int]:
        ids = self._encode_once(tokenizer, text, continues)
        if len(text) < 2 or self._markers.isdisjoint(ids):
            return ids
        middle = len(text) // 2  # the tokenizer's normalisation has made a marker of another spelling
        return self._encode(tokenizer, text[:middle], continues) + self._encode(tokenizer, text[middle:], True)

    def _encode_once(self, tokenizer: AnyTokenizer, text: str, continues: bool) -> list[int]:
        if continues and self._puts_space_in_front and text:
            anchor = encode_plain(tokenizer, ANCHOR)
            ids = encode_plain(tokenizer, ANCHOR + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return encode_plain(tokenizer, text)


def encode(tokenizer: AnyTokenizer, text: str, **options: bool) -> list[int]:
    """The ids of a text. Raises UnicodeEncodeError for an unpaired surrogate, which tokenizers do not handle."""
    text.encode()
    return list(tokenizer.encode(text, **options))


def encode_plain(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """The ids of a text in which tokens that are marked as special are not recognised."""
    return encode(tokenizer, text, add_special_tokens=False, split_special_tokens=True)


def pieces_of(tokenizer: AnyTokenizer, text: str) -> list[str]:
    return [str(piece) for piece in tokenizer.convert_ids_to_tokens(encode_plain(tokenizer, text))]


# A mark is the number of a special token's text between these private-use characters.
START, END = "\ue0f0", "\ue0f1"
MARK = re.compile(f"{START}(\\d+){END}")


class Marks:
    """The marks of one model's special tokens."""

    def __init__(self, special: Iterable[str], encode: Callable[[str], list[int]]) -> None:
        """`encode` returns the ids of a text as plain text."""
        texts = sorted(set(special), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._numbers = {text: number for number, text in enumerate(texts)}
        self._ids = list(map(encode, texts))

    def mark(self, value: Any) -> Any:
        """A JSON value with marks in the place of special tokens, in all of its strings."""
        if isinstance(value, str):
            clean = value.replace(START, "").replace(END, "")
            return self._pattern.sub(lambda found: f"{START}{self._numbers[found[0]]}{END}", clean)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(inner) for name, inner in value.items()}
        return [self.mark(inner) for inner in value] if isinstance(value, list) else value

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text with marks; `encode` returns those of the text between them."""
        ids: list[int] = []
        for number, piece in enumerate(MARK.split(text)):  # the odd pieces are numbers
            if number % 2:
                ids += self._ids[int(piece)]
            elif piece:
                ids += encode(piece)
        return ids


def count_marks(text: str) -> int:
    """The number of marks in a text; each is at least one token."""
    return len(MARK.findall(text))
