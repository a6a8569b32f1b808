"""Outrider's settings in each number of bits, from those of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.peer import KINDS
from bench.plan import BenchError
from outrider.server.settings import Settings, load_settings, parse_flags

CHOSEN_BY_BITS = ("model.dtype", "model.quantize")


@dataclass(frozen=True)
class Levels:
    """The settings of the command line, as a file and flags. All peers run on the CPU with the same number of threads."""

    config: Path | None
    flags: Sequence[str]
    threads: int

    def __post_init__(self) -> None:
        """Raises BenchError if a flag sets what the number of bits chooses."""
        given = parse_flags(self.flags)
        if name := next((name for name in CHOSEN_BY_BITS if name in given), None):
            raise BenchError(f"--bits chooses {name}; leave out --{name}.")

    def server_flags(self, bits: int) -> list[str]:
        """The settings as flags of `outrider serve`."""
        kind = KINDS[bits]
        chosen = ["--model.dtype", kind.dtype, "--model.quantize", kind.quantize]
        file = [] if self.config is None else ["--config", str(self.config)]
        return [*file, *self.flags, *chosen, "--model.device", "cpu", "--model.threads", str(self.threads)]

    def settings(self, bits: int) -> Settings:
        """The settings. Raises SettingsError."""
        flags = self.server_flags(bits)
        return load_settings(self.config, parse_flags(flags if self.config is None else flags[2:]))
