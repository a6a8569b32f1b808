"""The setup of all contenders: the model in the formats that they read, threads, and Outrider's settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.live.turns import Peer
from bench.model import gguf_file
from bench.plan import BenchError
from outrider.drafters.interface import Ints
from outrider.server.settings import Settings

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Question:
    """A prompt, as text and as token ids, and how to answer it."""

    prompt: str
    ids: Ints  # int32 [P]
    temperature: float
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Choice:
    """The choice of measurements."""

    prompts: Path
    questions: int  # per task
    drafters: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int
    peers: Sequence[str]  # names in `bench.live.run.PEERS`
    only: str  # names of tasks; empty measures all
    gguf: Path | None = None  # llama.cpp's file; None is the model's own, or one that is converted


@dataclass(frozen=True)
class Setup:
    """The model, and how it is run."""

    choice: Choice
    settings: Settings  # Outrider's
    flags: Sequence[str]  # the same settings for a server's command line
    threads: int
    context_tokens: int
    folder: Path  # for converted files

    @property
    def dtype(self) -> str:
        """The data type of the weights of programs that read the model's folder."""
        return "float32" if self.settings.model.dtype == "float32" else "bfloat16"

    @cached_property
    def gguf_path(self) -> Path:
        """The model as a GGUF file, converted if it has to be. Raises BenchError."""
        path = Path(self.settings.model.path)
        source = self.choice.gguf or (path if path.suffix == ".gguf" else None)
        if source is None:
            if not path.is_dir():
                raise BenchError(f"{path} is no folder, and only folders are converted; give llama.cpp's file with --gguf.")
            source = self.folder / "model.gguf"
            gguf_file.convert(path, source, GGUF_TYPES[self.dtype])
        if not source.exists():
            raise BenchError(f"There is no file {source}; give another one with --gguf.")
        return source

    @cached_property
    def model_folder(self) -> str:
        """The model as a folder in `dtype`: what the settings name, or the GGUF file that they name, unpacked."""
        path = Path(self.settings.model.path)
        if path.suffix != ".gguf":
            return self.settings.model.path
        unpacked = self.folder / "model"
        gguf_file.unpack(path, unpacked, self.dtype)
        return str(unpacked)


class LivePeer(Peer[Question]):
    """A program that answers chats. Adding one is adding a class, and its name in `bench.live.run.PEERS`."""

    @abstractmethod
    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        """Loads the model or starts servers; closing the stack frees and ends them. Raises BenchError."""
