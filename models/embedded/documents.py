"""The training text of the embedded models: Python sources that are installed in the project's environment.

The same versions give the same documents in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The share of files, chosen by the hash of their text.
HELD_OUT_SHARE = 1 / 64
MAX_FILE_BYTES = 200_000
SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "_vendor", "site-packages", "idlelib", "lib2to3", "encodings", "pydoc_data"),
    *("turtledemo", "models", "conformance", "_internal_testing", "ensurepip"),
}


@dataclass(frozen=True)
class Source:
    """One importable package."""

    package: str
    licence: str
    folders: tuple[str, ...] = ("",)  # folders of the package to read; "" reads all


STANDARD_LIBRARY = Source("", "PSF-2.0")
SOURCES = (
    STANDARD_LIBRARY,
    Source("networkx", "BSD-3-Clause"),
    Source("numpy", "BSD-3-Clause"),
    Source("sympy", "BSD-3-Clause", ("core", "utilities", "ntheory", "combinatorics", "functions", "sets", "logic")),
    Source("mpmath", "BSD-3-Clause"),
    Source("torch", "BSD-3-Clause", ("nn", "optim", "utils", "distributions", "fx", "autograd", "ao")),
    Source("transformers", "Apache-2.0", ("utils", "generation", "data", "pipelines")),
    Source("huggingface_hub", "Apache-2.0"),
    Source("fsspec", "BSD-3-Clause"),
    Source("jinja2", "BSD-3-Clause"),
    Source("pygments", "BSD-2-Clause", ("formatters", "filters", "styles")),
    Source("rich", "MIT"),
    Source("click", "BSD-3-Clause"),
    Source("fastapi", "MIT"),
    Source("starlette", "BSD-3-Clause"),
    Source("pydantic", "MIT"),
    Source("httpx", "BSD-3-Clause"),
    Source("anyio", "MIT"),
    Source("uvicorn", "BSD-3-Clause"),
    Source("packaging", "BSD-2-Clause"),
    Source("_pytest", "MIT"),
    Source("setuptools", "MIT"),
    Source("mypy", "MIT"),
    Source("numba", "BSD-2-Clause", ("core", "np", "misc", "cpython", "typed")),
)


@dataclass(frozen=True)
class Document:
    """One training document."""

    text: str  # ends with <|end|>
    held_out: bool


def documents(seed: int = 0) -> list[Document]:
    """All documents, shuffled by `seed`: whole files, and functions as chats (docstring as question, code as answer)."""
    result: list[Document] = []
    for text in _files():
        held_out = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) < HELD_OUT_SHARE * 2**32
        result.append(Document(text + "<|end|>", held_out))
        result.extend(Document(chat, held_out) for chat in _chats(text))
    random.Random(seed).shuffle(result)
    return result


def _files() -> Iterator[str]:
    seen: set[str] = set()
    for source in SOURCES:
        for path in _paths(source):
            text = _read(path)
            if text and text not in seen:
                seen.add(text)
                yield text


def _paths(source: Source) -> Iterator[Path]:
    if source is STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
    else:
        spec = importlib.util.find_spec(source.package)
        if spec is None or not spec.submodule_search_locations:
            return
        root = Path(spec.submodule_search_locations[0])
    for folder in source.folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]):
                yield path


def _read(path: Path) -> str:
    """The file's text, or "" if it is too large, not UTF-8, or data rather than code."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    digits = sum(character.isdigit() or ord(character) > 127 for character in text)
    if len(text) > MAX_FILE_BYTES or digits > 0.15 * len(text):
        return ""
    return text.strip() + "\n"


def _chats(text: str) -> Iterator[str]:
    """The functions of a source file as chats."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            question = _question(node)
            answer = _answer(node, lines)
            if question and answer:
                yield f"<|user|>\n{question}<|end|>\n<|assistant|>\n```python\n{answer}\n```<|end|>"


def _question(node: ast.FunctionDef) -> str:
    """A request for the function, made from its docstring; "" if the summary is missing, very short or very long."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return ""
    summary = " ".join(docstring.split("\n\n")[0].split())
    if not 20 <= len(summary) <= 400:
        return ""
    # The name determines the wording, so that a function always has the same question.
    wording = hashlib.sha256(node.name.encode()).digest()[0] % 4
    arguments = ", ".join(argument.arg for argument in node.args.args if argument.arg not in ("self", "cls"))
    return (
        summary,
        f"Write a Python function {node.name}({arguments}). {summary}",
        f"Write a Python function: {summary}",
        f"Implement `{node.name}({arguments})` in Python. {summary}",
    )[wording]


def _answer(node: ast.FunctionDef, lines: list[str]) -> str:
    """The function's code without decorators and docstring; "" if it is very short or very long."""
    body = node.body[1:]
    if not body or node.end_lineno is None:
        return ""
    code = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[body[0].lineno - 1 : node.end_lineno]
    if not 2 <= len(code) <= 40:
        return ""
    return textwrap.dedent("\n".join(code)).strip()
