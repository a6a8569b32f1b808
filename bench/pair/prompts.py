"""Prompts for the servers: chats, code, edits of a file, questions about files, and turns of an agent.

The files are those of the drafters' package, so everybody with the same version asks the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import outrider.drafters

# The mean length of a token of code, in characters.
TOKEN_CHARACTERS = 4


@dataclass(frozen=True)
class Question:
    """One conversation whose next turn is measured."""

    messages: list[dict[str, Any]]
    fields: dict[str, Any] = field(default_factory=dict)  # of the request, such as tools


CHATS = (
    "Explain to a colleague why the sky is blue, in one paragraph.",
    "Plan a week of dinners for two people who like vegetables, with a shopping list.",
    "Write a short letter that declines an invitation to a conference.",
    "What are the differences between a process and a thread? Give an example of each.",
)
CODE = (
    "Write a Python function that merges two sorted lists, with a docstring and three tests.",
    "Write a Python class for a least-recently-used cache with get and put, and explain its complexity.",
    "Write a Python function that parses a line of CSV with quoted fields. No imports.",
    "Write a Python script that counts the words of all text files in a folder and prints the ten most frequent.",
)
EDITS = (
    ("lookup.py", "Rename the parameter `tokens` to `token_ids` everywhere"),
    ("noise.py", "Add a sentence about the date of the last change to the module's docstring"),
    ("none.py", "Add a type alias `Count = int` below the imports, and use it where it fits"),
    ("policy.py", "Replace every constant's name by the same name with the prefix `DEFAULT_`"),
)
QUESTIONS = (
    "Which classes are defined in these files? Quote the first line of each docstring.",
    "Which constants are defined in these files? Quote their lines.",
    "Quote all import statements of these files.",
    "List the functions of these files with their parameters, as in the files.",
)
TOOLS = (
    ("read_file", {"path": {"type": "string"}}),
    ("run_command", {"command": {"type": "string"}, "timeout_seconds": {"type": "integer"}}),
    ("edit_file", {"path": {"type": "string"}, "old_text": {"type": "string"}, "new_text": {"type": "string"}}),
)
READ = ("lookup.py", "noise.py", "policy.py", "none.py")


def chat(number: int) -> Question:
    return Question([user(CHATS[number])])


def code(number: int) -> Question:
    return Question([user(CODE[number])])


def edit(number: int) -> Question:
    """A file to write again, with a change. The file is sent as OpenAI's `prediction`, too."""
    name, change = EDITS[number]
    text = source(name)
    asked = f"{change} in this file. Answer with the whole file and nothing else.\n\n```python\n{text}```"
    return Question([user(asked)], {"prediction": {"type": "content", "content": text}})


def rag(number: int) -> Question:
    """A question that is answered with parts of two files."""
    files = "\n".join(f"# {name}\n{source(name)}" for name in (READ[number], READ[number - 1]))
    return Question([user(f"{files}\n{QUESTIONS[number]}")])


def agent(number: int) -> Question:
    """The turn after a file was read by a tool."""
    call = {"name": "read_file", "arguments": f'{{"path": "{READ[number]}"}}'}
    messages = [
        {"role": "system", "content": "You are a careful programmer. Use the tools; change one file at a time."},
        user(f"Add a log line to the first function of {READ[number]}."),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": source(READ[number])},
    ]
    return Question(messages, {"tools": [tool(name, properties) for name, properties in TOOLS]})


TASKS: Mapping[str, Callable[[int], Question]] = {"chat": chat, "code": code, "edit": edit, "rag": rag, "agent": agent}


def after(context_tokens: int, question: Question) -> Question:
    """The question after about this many tokens of files."""
    if not context_tokens:
        return question
    files = "\n".join(f"# {file.name}\n{file.read_text()}" for file in sorted(folder().rglob("*.py")))
    size = context_tokens * TOKEN_CHARACTERS
    known = user(f"Files of the project:\n{(files * (1 + size // len(files)))[:size]}")
    thanks = {"role": "assistant", "content": "I have read them."}
    system = [each for each in question.messages if each["role"] == "system"]
    return Question([*system, known, thanks, *question.messages[len(system) :]], question.fields)


def apart(question: Question, name: str) -> Question:
    """The question in a conversation that begins with its name, so that a server reuses nothing of another conversation."""
    first, *others = question.messages
    return Question([{**first, "content": f"Conversation {name}.\n\n{first['content']}"}, *others], question.fields)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """A function that the model may call."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema}}


@cache
def folder() -> Path:
    return Path(outrider.drafters.__file__).parent


def source(name: str) -> str:
    return (folder() / name).read_text()
