"""Fill-in-the-middle: the markers of code models, and the order of a prompt's parts.

A prompt begins with what changes least while its user types: files given as context, then the text before the cursor or, where
the model was trained so, the text after it. Knows nothing about tokenizers.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

Markers = tuple[str | None, ...]
# These are llama-server's names; requests to /infill contain neither.
REPOSITORY_LINE, CURRENT_FILE_LINE = "myproject\n", "filename\n"
# A long text is cut by multiples of this, so that prompts of consecutive keystrokes begin alike.
CUT_TOKENS = 256
# One marker each stands in front of the prefix, the suffix and the answer.
MARKER_COUNT = 3
# The prefix gets this share of the room for the texts around the cursor, if both are long.
PREFIX_SHARE = 0.75


# The markers in front of the prefix, of the suffix, and of the answer; without the last one, the prefix comes last, and the
# answer continues it. The first format whose markers are all in the vocabulary is used.
FORMATS: tuple[Markers, ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder and later, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
# The first marker precedes the repository's name, if there is one, and the second a file's name.
REPOSITORY_FORMATS: tuple[Markers, ...] = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen
    ("<repo_name>", "<file_sep>"),  # StarCoder 2
    ("<reponame>", "<filename>"),  # Granite 3, StarCoder
    (None, "<|file_separator|>"),  # CodeGemma
)
# Models also end an answer with these tokens.
ENDS = ("<|endoftext|>", "[MIDDLE]", "<|fim_pad|>", "<fim_pad>", "▁<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
MARKERS = frozenset(text for group in (*FORMATS, *REPOSITORY_FORMATS, ENDS) for text in group if text is not None)


class ContextFile(NamedTuple):
    """A file or part of one, given as context."""

    name: str
    text: str

    @property
    def lines(self) -> str:
        """The name and the text, each ending with a newline."""
        return f"{self.name}\n{self.text}" + ("" if self.text.endswith("\n") else "\n")


@dataclass(frozen=True)
class FillInText:
    """The text around the cursor, as a client sends it."""

    prefix: str | list[int]  # text or token ids
    suffix: str
    files: tuple[ContextFile, ...] = ()

    @property
    def characters(self) -> int:
        """The length of all texts and ids."""
        return len(self.prefix) + len(self.suffix) + sum(len(name) + len(text) for name, text in self.files)


@dataclass(frozen=True)
class FillInTokens:
    """The markers in a model's vocabulary, as ids."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None  # None = files are separated by their names only
    stops: tuple[int, ...]  # tokens that end an answer

    def end(self, prompt: Collection[int]) -> tuple[int, ...]:
        """The tokens that end the answer to a prompt; none if it does not ask to fill in."""
        markers = {self.prefix, self.suffix} if self.middle is None else {self.middle}
        return self.stops if all(marker in prompt for marker in markers) else ()


@dataclass(frozen=True)
class FillInParts:
    """The token ids of a prompt's parts. Those of files include their markers."""

    prefix: list[int]
    suffix: list[int]
    files: Sequence[list[int]] = ()
    before_files: list[int] = field(default_factory=list)
    after_files: list[int] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """The tokens before the current file; empty without files."""
        return [*self.before_files, *chain.from_iterable(self.files), *self.after_files] if self.files else []


def find_tokens(vocabulary: Mapping[str, int]) -> FillInTokens | None:
    """The markers in a vocabulary; None if the model cannot fill in."""

    def first(formats: Sequence[Markers]) -> list[int | None]:
        """The ids of the first format that the vocabulary has; empty if it has none."""
        known = (each for each in formats if all(text in vocabulary for text in each if text is not None))
        return [None if text is None else vocabulary[text] for text in next(known, ())]

    if not (markers := first(FORMATS)):
        return None
    prefix, suffix, middle = markers
    assert prefix is not None and suffix is not None
    repository, file = first(REPOSITORY_FORMATS) or (None, None)
    stops = tuple(sorted(vocabulary[text] for text in MARKERS if text in vocabulary))
    return FillInTokens(prefix, suffix, middle, repository, file, stops)


def encode_parts(tokens: FillInTokens, text: FillInText, encode: Callable[[str, bool], list[int]]) -> FillInParts:
    """Encodes a prompt's texts; the second argument of `encode` tells that a text continues another one."""
    marker = [] if tokens.file is None else [tokens.file]
    return FillInParts(
        prefix=encode(text.prefix, False) if isinstance(text.prefix, str) else text.prefix,
        suffix=encode(text.suffix, True),
        files=[[*marker, *encode(file.lines, False)] for file in text.files],
        before_files=[] if tokens.repository is None else [tokens.repository, *encode(REPOSITORY_LINE, False)],
        after_files=[*marker, *encode(CURRENT_FILE_LINE, False)] if marker else [],
    )


def fit(parts: FillInParts, room: int) -> FillInParts:
    """Leaves out what has no place in `room` tokens: the first files, then the prefix's beginning and the suffix's end."""
    left = room - len(parts.prefix) - len(parts.suffix) - len(parts.before_files) - len(parts.after_files)
    ends = accumulate(map(len, reversed(parts.files)))  # the last files stay
    kept = sum(1 for _ in takewhile(lambda tokens: tokens <= left, ends))
    parts = replace(parts, files=parts.files[len(parts.files) - kept :])
    prefix_room = max(int(PREFIX_SHARE * room), room - len(parts.suffix))
    surplus = max(0, len(parts.prefix) - prefix_room)
    prefix = parts.prefix[math.ceil(surplus / CUT_TOKENS) * CUT_TOKENS :]
    return replace(parts, prefix=prefix, suffix=parts.suffix[: max(0, room - len(parts.context) - len(prefix))])


def assemble(tokens: FillInTokens, parts: FillInParts) -> list[int]:
    """The prompt, without the token that begins every text."""
    if tokens.middle is None:
        return [*parts.context, tokens.suffix, *parts.suffix, tokens.prefix, *parts.prefix]
    return [*parts.context, tokens.prefix, *parts.prefix, tokens.suffix, *parts.suffix, tokens.middle]
