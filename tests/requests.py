"""Requests that many tests send to a server."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.grammars import record
from tests.servers import Served

PROMPT = "def read_file(path):\n"
MESSAGES: Any = [{"role": "user", "content": "Write a function that reads a file."}]
ENDLESS: dict[str, Any] = {"temperature": 1.5, "max_tokens": 1900, "n": 16, "ignore_eos": True}  # minutes of work

WEATHER = record(city={"type": "string", "maxLength": 10}, days={"$ref": "#/$defs/days"})
WEATHER["$defs"] = {"days": {"type": "integer", "minimum": 1, "maximum": 9}}
CLOCK = record(zone={"enum": ["utc", "cet"]})
TOOL_SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOL_SCHEMAS.items()]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in TOOL_SCHEMAS.items()
]


def body(server: Served, **fields: Any) -> dict[str, Any]:
    """The body of a greedy completion, updated with `fields`."""
    return {"model": server.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 40, **fields}


def complete(server: Served, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json=body(server, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    """The text of a completion's first choice."""
    return str(answer["choices"][0]["text"])


def events(server: Served, path: str, fields: dict[str, Any]) -> list[Any]:
    """The data of a stream's events; the last one is "[DONE]"."""
    with server.http.stream("POST", path, json=fields) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    assert raw.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in raw.split("\n\n") if line and not line.startswith(":")]
    return [json.loads(line) for line in data[:-1]] + [data[-1]]


@contextmanager
def streaming(server: Served, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a completion's stream after its first line."""
    with server.http.stream("POST", "/v1/completions", json=body(server, stream=True, **fields)) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


@contextmanager
def stalled(server: Served, key: str = "", **fields: Any) -> Iterator[socket.socket]:
    """A connection that has sent a request for a long stream, and reads nothing."""
    content = json.dumps({"model": server.model, "prompt": "x = ", "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        parts = urlsplit(server.url)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(head.encode() + content)
        yield connection
