"""What a peer is: a program that holds the model in some number of bits and answers prompts by one or more methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from bench.plan import BenchError
from outrider.drafters.interface import Ints
from outrider.server.settings import Settings

Transport = Literal["in process", "HTTP"]


class Kind(NamedTuple):
    """How programs name weights of some number of bits."""

    dtype: str  # model.dtype
    quantize: str  # model.quantize
    gguf: str  # type of the tensors in a GGUF file


KINDS = {
    32: Kind("float32", "none", "F32"),
    16: Kind("bfloat16", "none", "BF16"),
    8: Kind("bfloat16", "int8", "Q8_0"),
    4: Kind("bfloat16", "int4", "Q4_0"),
}


@dataclass(frozen=True)
class Weights:
    """The model in one number of bits."""

    bits: int
    settings: Settings  # Outrider's, of these bits
    flags: Sequence[str]  # the same settings for a server's command line
    threads: int
    context_tokens: int
    folder: Path  # for converted files
    drafters: Sequence[str]
    draft: str | None  # folder of the assistant model of transformers' generate

    @property
    def path(self) -> str:
        """The model's folder or hub id."""
        return self.settings.model.path

    @cached_property
    def gguf(self) -> Path:
        """The model as a GGUF file, converted once. Raises BenchError."""
        from bench.model.gguf_file import convert

        if not Path(self.path).is_dir():
            raise BenchError(
                f"{self.path} is no folder, and only folders are converted to GGUF; leave out llama.cpp with --peer."
            )
        file = self.folder / f"{self.bits}.gguf"
        if not file.exists():
            convert(Path(self.path), file, KINDS[self.bits].gguf)
        return file


@dataclass(frozen=True)
class Question:
    """A prompt, as text and as token ids, and how to answer it."""

    prompt: str
    ids: Ints  # int32 [P]
    temperature: float
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What a peer answered."""

    tokens: int
    seconds: float  # prompt included
    ids: list[int] | None = None  # None over HTTP, except Outrider's in chats
    steps: int | None = None  # forwards that emitted tokens, if the peer counts them
    first_token_seconds: float | None = None  # from the start; None without streaming
    prompt_tokens: int | None = None  # None if the peer was given token ids
    text: str | None = None  # None in process


class Peer(ABC):
    """A program that holds the weights. Adding a peer is adding a class, and its name in `bench.peers.answers.PEERS`."""

    name: ClassVar[str]
    transport: ClassVar[Transport]
    bits: ClassVar[Sequence[int]] = tuple(KINDS)
    packages: ClassVar[Mapping[str, str]] = {}  # the modules that it needs, and what pip installs for each
    methods: Sequence[str]

    @abstractmethod
    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        """Loads the weights or starts the server; closing the stack frees and ends them. Raises BenchError."""

    @abstractmethod
    def answer(self, method: str, question: Question) -> Answer:
        """Answers by one of `methods`. Raises BenchError if a server refuses."""


def install_command(packages: Mapping[str, str]) -> str | None:
    """The command that installs what is missing of `packages`, or None."""
    missing = dict.fromkeys(requirement for module, requirement in packages.items() if find_spec(module) is None)
    return f"pip install {' '.join(missing)}" if missing else None
