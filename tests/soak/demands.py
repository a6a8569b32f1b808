"""What the clients of the load run ask: equal demands of every key, with answers that are known."""

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from outrider import models
from tests.server.encoders.encoders import save_all
from tests.server.pictures.models import picture, write_qwen

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a fox. Once upon a time there was a",
    "import os\n\ndef walk(path):",
    "SELECT name, count(*) FROM users",
    "class Stack:\n    def __init__(self):",
    "for i in range(10):\n    print(",
    "The quick brown fox",
)
DRAFTERS = ("none", "lookup", "fusion", "trigram", "lookahead")
# What each of a key's ten clients asks for.
ROLES = ("text",) * 5 + ("pictures", "embeddings", "rerank", "corpora", "leaves")
EMBEDDING_DIFFERENCE = 0.01  # texts are encoded beside others, in another order
NUMBERS = count()


@dataclass(frozen=True)
class Demand:
    """A request."""

    role: str
    path: str
    body: dict[str, Any]
    known: str = ""  # demands with equal keys have equal answers
    method: str = "POST"

    def sent(self, client: int, plain: bool) -> dict[str, Any]:
        """The body: drafted and in a session, or `plain`; a schema is always a new one, so that it is compiled."""
        body = dict(self.body)
        if "response_format" in body:
            schema = SCHEMA | {"description": f"number {next(NUMBERS)}"}
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        if self.role != "text" or "completions" not in self.path:
            return body
        if plain:
            return body | {"speculation": {"drafter": "none"}}
        number = next(NUMBERS)
        return body | {"speculation": {"drafter": DRAFTERS[number % len(DRAFTERS)]}, "session_id": f"{client} {number % 3}"}


PICTURES = 4
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def save_models(folder: Path) -> list[str]:
    """Writes models that read pictures, embed and rerank, of random weights; returns the paths of all served models."""
    write_qwen(folder / "vision")
    save_all(folder)
    return [str(models.TARGET), *(str(folder / name) for name in ("vision", "embedder", "reranker"))]


def demands(role: str, client: int) -> Iterator[Demand]:
    """What a client asks for, without end: the same for each key."""
    known = [each for each in all_known() if each.role == role]
    for number in count(client):
        prompt = PROMPTS[number % len(PROMPTS)]
        if role == "corpora":
            name = f"corpus-{number % 3}"
            yield Demand(
                role, "/v1/outrider/corpora", {"model": models.NAME, "name": name, "texts": [prompt * 20], "default": True}
            )
            if number % 4 == 3:
                yield Demand(role, f"/v1/outrider/corpora/{name}?model={models.NAME}", {}, method="DELETE")
        elif role == "leaves":
            yield Demand(role, "/v1/completions", text(prompt, 0, 200) | {"stream": True})
        elif role == "pictures":
            yield picture_demand(number % PICTURES, os.urandom(8))
        else:
            yield known[number % len(known)]


def text(prompt: str, temperature: float, tokens: int = 24, **fields: Any) -> dict[str, Any]:
    body = {"model": models.NAME, "prompt": prompt, "temperature": temperature, "max_tokens": tokens, "seed": len(prompt)}
    return body | fields


def all_known() -> list[Demand]:
    """Demands with one right answer each."""
    found = []
    for prompt in PROMPTS:
        turn = {"messages": [{"role": "user", "content": prompt}], "model": models.NAME, "temperature": 0, "max_tokens": 20}
        asked = {"model": models.NAME, "input": prompt, "temperature": 0, "max_output_tokens": 16}
        found += [
            Demand("text", "/v1/completions", text(prompt, 0.8), f"sampled {prompt}"),
            Demand("text", "/v1/completions", text(prompt, 0, 40, stream=True), f"stream {prompt}"),
            Demand("text", "/v1/completions", text(prompt, 0.8, 12, n=3), f"choices {prompt}"),
            Demand("text", "/v1/chat/completions", turn, f"chat {prompt}"),
            Demand("text", "/v1/chat/completions", turn | {"seed": 1, "response_format": {}}, f"grammar {prompt}"),
            Demand("text", "/v1/messages", turn, f"message {prompt}"),
            Demand("text", "/v1/responses", asked, f"response {prompt}"),
            Demand("embeddings", "/v1/embeddings", {"model": "embedder", "input": [prompt, prompt[::-1]]}, f"embed {prompt}"),
            Demand("rerank", "/v1/rerank", {"model": "reranker", "query": prompt, "documents": PROMPTS[:5]}, f"rank {prompt}"),
        ]
    return [*found, *map(picture_demand, range(PICTURES))]


def picture_demand(seed: int, end: bytes = b"") -> Demand:
    """A question about a picture. Other bytes after its end make it a new one to every cache, and change no answer."""
    url = "data:image/png;base64," + base64.b64encode(picture(seed) + end).decode()
    parts = [{"type": "text", "text": "what "}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}], "model": "vision", "temperature": 0, "max_tokens": 8}
    return Demand("pictures", "/v1/chat/completions", body, f"picture {seed}")


def answer(demand: Demand, response: httpx.Response) -> tuple[Any, int]:
    """What is right or wrong in an answer, and its tokens. A stream's error is raised as RuntimeError."""
    if demand.body.get("stream"):
        parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        if failed := [part["error"]["message"] for part in parts if "error" in part]:
            raise RuntimeError(failed[0])
        written = "".join(choice["text"] for part in parts for choice in part["choices"])
        return [written], demand.body["max_tokens"]
    body = response.json()
    usage = body.get("usage") or {}
    tokens = usage.get("completion_tokens", usage.get("output_tokens", usage.get("total_tokens", 1)))
    if "choices" in body:
        choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
        return [choice.get("text") or choice["message"]["content"] for choice in choices], tokens
    if "content" in body:
        return [block.get("text") for block in body["content"]], tokens
    if "output" in body:
        return [part.get("text") for item in body["output"] for part in item.get("content") or ()], tokens
    if "results" in body:
        return [found["relevance_score"] for found in sorted(body["results"], key=lambda each: int(each["index"]))], tokens
    return [value for each in body["data"] for value in each["embedding"]], tokens


def is_right(found: list[Any], expected: list[Any]) -> bool:
    """Whether an answer is the known one."""
    if len(found) != len(expected) or not all(isinstance(each, float) for each in expected):
        return found == expected
    return all(abs(a - b) <= EMBEDDING_DIFFERENCE for a, b in zip(found, expected, strict=True))
