"""The programs that `outrider launch` starts, as programs.yaml describes them, and what one run of a program gets."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("programs.yaml")
# An answer may have this many tokens, or this share of a shorter context.
MAX_OUTPUT_TOKENS, OUTPUT_SHARE = 8192, 4
COUNTS = ("{context}", "{output}")


@dataclass(frozen=True)
class Program:
    """How a program is installed and run; programs.yaml has the fields in braces."""

    name: str
    install: str
    command: tuple[str, ...]  # the executable, and arguments before the user's
    environment: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)  # by name in {folder}


@dataclass(frozen=True)
class Server:
    url: str  # without /v1
    model: str
    context_tokens: int
    key: str


@dataclass(frozen=True)
class Run:
    """A program's command and what it adds to the environment."""

    command: list[str]
    environment: dict[str, str]

    def shell(self) -> str:
        """The lines to paste into a shell."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*exports, shlex.join(self.command)])


def read_programs() -> dict[str, Program]:
    table = yaml.safe_load(TABLE.read_text())
    return {name: Program(name, **{**row, "command": tuple(row["command"])}) for name, row in table.items()}


def prepare(program: Program, server: Server, folder: Path, arguments: list[str]) -> Run:
    """A run in which `arguments` follow those of the program. Writes the program's files to `folder`."""
    fields = {
        "url": server.url,
        "model": server.model,
        "key": server.key,
        "context": str(server.context_tokens),
        "output": str(min(MAX_OUTPUT_TOKENS, server.context_tokens // OUTPUT_SHARE)),
        "folder": str(folder),
    }
    for name, content in program.files.items():
        (folder / name).write_text(as_text(content, fields))
    environment = {name: as_text(content, fields) for name, content in program.environment.items()}
    return Run([*(as_text(each, fields) for each in program.command), *arguments], environment)


def as_text(content: Any, fields: Mapping[str, str]) -> str:
    """The text with its fields replaced, or the JSON of what is no text."""
    if not isinstance(content, str):
        return json.dumps(fill(content, fields))
    text = content
    for name, value in fields.items():
        text = text.replace("{" + name + "}", value)
    return text


def fill(content: Any, fields: Mapping[str, str]) -> Any:
    """What JSON holds, with its fields replaced, also in the names of objects. A count alone becomes a number."""
    if isinstance(content, str):
        return int(fields[content[1:-1]]) if content in COUNTS else as_text(content, fields)
    if isinstance(content, Mapping):
        return {as_text(name, fields): fill(value, fields) for name, value in content.items()}
    return [fill(each, fields) for each in content] if isinstance(content, list) else content
