"""Counts the reads, writes and launches of a step on a GPU, by part."""

from dataclasses import dataclass, field

PARTS = ("linear", "attention", "elementwise", "sampling")


@dataclass
class Counts:
    """The bytes and launches of one step."""

    bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    launches: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    weight_bytes: float = 0.0  # of the linear layers, once
    text_bytes: float = 0.0  # keys, values and states, once
    flops: float = 0.0  # of the linear layers

    @property
    def needed_bytes(self) -> float:
        """The bytes that any engine reads."""
        return self.weight_bytes + self.text_bytes

    def add(self, part: str, nbytes: float, launches: int) -> None:
        """Adds launches, and the bytes that they read and write."""
        self.bytes[part] += nbytes
        self.launches[part] += launches
