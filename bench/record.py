"""Answers measured one by one, saved after each: a run that was stopped goes on where it ended."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bench import report
from bench.plan import BenchError

Row = dict[str, Any]


class Record:
    """The answers of one benchmark, in the file that `--out` names."""

    def __init__(self, out: Path | None, about: Mapping[str, Any], key: Sequence[str]) -> None:
        """`about` says what is measured; the figures `key` tell answers apart. Raises BenchError for another run's file."""
        self._out, self._about, self._key = out, {**report.provenance(), **about}, key
        self.answers = read(out, about) if out and out.exists() else list[Row]()

    def has(self, place: Mapping[str, Any]) -> bool:
        """Whether the answer at a place, such as a question and a drafter, was measured."""
        return any(all(row[name] == place[name] for name in self._key) for row in self.answers)

    def add(self, place: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        self.answers.append({**{name: place[name] for name in self._key}, **figures})
        self.save({})

    def save(self, summary: Mapping[str, Any]) -> None:
        """Writes the file, if there is to be one."""
        if self._out:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            head = json.dumps({**self._about, **summary}, indent=1).removesuffix("\n}")
            rows = ",\n".join(f"  {json.dumps(row)}" for row in self.answers)
            self._out.write_text(f'{head},\n "answers": [\n{rows}\n ]\n}}\n')


def read(path: Path, about: Mapping[str, Any]) -> list[Row]:
    """The answers of an earlier run of the same benchmark. Raises BenchError."""
    try:
        saved = json.loads(path.read_text())
        answers = list[Row](saved["answers"])
    except (OSError, ValueError, LookupError, TypeError):
        raise BenchError(f"{path} has no answers to go on with; give another file by --out.") from None
    if other := [name for name, value in about.items() if saved.get(name) != value]:
        name = other[0]
        raise BenchError(f"{path} was measured with {name} {saved.get(name)}, not {about[name]}; give another file by --out.")
    return answers


def digest(text: str) -> str:
    """Equal for equal answers."""
    return blake2b(text.encode(), digest_size=6).hexdigest()
