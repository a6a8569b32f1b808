"""Requests that cost a server far more than their client: none is a server's error, and another key's answers stay right."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from outrider import models
from outrider.verify.tokenizer import load_tokenizer
from tests.grammars import rule_chain, terminal_chain
from tests.requests import complete
from tests.servers import ALICE, BOB, Served, serving, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("bombs")]
BODY_BYTES = 400_000
BRACKETS = 20_000  # characters
Bomb = tuple[str, dict[str, Any]]  # a path, and the fields of a body


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    flags = ["--model.dtype", "float32", "--speculation.max_nodes", "16", "--limits.body_bytes", str(BODY_BYTES)]
    with serving(*flags, "--auth.keys.alice", ALICE, "--auth.keys.bob", BOB, key=ALICE) as server:
        yield server


RAW = re.compile(r'"RAW((?:[^"\\]+|\\.)*)"')


def raw(text: str) -> str:
    """Text that `encode` writes as it is: JSON that is too deep for the json module."""
    return "RAW" + text


def encode(body: Any) -> bytes:
    return RAW.sub(lambda match: str(json.loads(f'"{match[1]}"')), json.dumps(body)).encode()


# Each mask takes longer than the one before.
AMBIGUOUS = "start: s\ns: s s | w\nw: /[a-z ]/"
GRAMMARS = (
    rule_chain(2900),
    terminal_chain(1450),
    "start: " + "(" * BRACKETS + '"x"' + ")" * BRACKETS,
    "start: " + '("x" ' * 8000 + "start?" + ")" * 8000,
    'start: a a a a a a a a\na: a a | b b | b | ""\nb: a | "x"?',
    "start: " + " | ".join(f'"x{number}"' for number in range(5000)),
    "start: start",
    "start: /" + "(" * BRACKETS + "x" + ")" * BRACKETS + "/",
    'start: "x"{1000000}',
    AMBIGUOUS,
)
REGEXES = ["(" * BRACKETS + "a" + ")" * BRACKETS, "(?:" * 12_000 + "a" + ")?" * 12_000, "[" * BRACKETS, "(a?){5000}a{5000}"]
REGEXES += ["((((a{1,99}){1,99}){1,99}){1,99}){1,99}", "(a+)+$", "|".join(f"a{number}b*" for number in range(5000))]
REGEXES += [r"\p{L}{1,9999}x|(\p{N}|.){9999}", "(.*a){500}"]


def schemas() -> Iterator[Any]:
    """Deep, cyclic, wide and impossible schemas."""
    for levels in (60, 600, 1500):
        yield raw('{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels)
    yield raw("[" * BRACKETS + "]" * BRACKETS)
    links: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(1500)}
    yield {"$ref": "#/$defs/d0", "$defs": links | {"d1500": {"type": "integer"}}}
    yield {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    forks = {f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(60)}
    yield {"$ref": "#/$defs/d0", "$defs": forks | {"d60": {"type": "null"}}}
    yield {"enum": [f"value {number}" for number in range(4000)]}
    yield {"type": "array", "items": {"type": "array", "minItems": 10**9}, "minItems": 10**9}
    yield {"type": "string", "pattern": "(a?){5000}a{5000}", "maxLength": 10**9}
    yield {"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 5e-324}
    yield {"allOf": [{"type": "object", "properties": {f"p{number}": {}}} for number in range(1200)]}


def completion(**fields: Any) -> Bomb:
    return "/v1/completions", {"prompt": "x", "max_tokens": 4, **fields}


def chat(**fields: Any) -> Bomb:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}


def structures() -> Iterator[Bomb]:
    """Grammars, expressions and schemas that are deep, long or ambiguous; masks that are slow for every node of a draft."""
    yield from (completion(grammar=grammar) for grammar in GRAMMARS)
    yield from (completion(regex=regex) for regex in REGEXES)
    for schema in schemas():
        yield completion(grammar="start: %json " + encode(schema).decode())
        yield chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}})
        called = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield chat(tools=[called], tool_choice="required")
    letters = "".join(chr(ord("a") + number % 26) for number in range(1000))
    draft: dict[str, Any] = {"prediction": {"type": "content", "content": letters}, "max_tokens": 1000, "ignore_eos": True}
    yield completion(grammar=AMBIGUOUS, **draft, speculation={"drafter": "prediction", "max_nodes": 128})


def copies(items: list[Any]) -> list[Any]:
    """A list as often as a body has room for it."""
    return items * ((BODY_BYTES - 1000) // (len(encode(items)) + 1))


def large_bodies() -> Iterator[Bomb]:
    """Bodies whose validation takes far longer than their transfer; most of them are not valid."""
    turns = [{"role": role, "content": [{"type": "text", "text": ""}] * 2} for role in ("user", "assistant")]
    functions = [{"type": "function", "name": "f"}] * 20
    numbers = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "1," * 20_000 + "1]"}}
    yield "/v1/messages", {"messages": copies(turns), "max_tokens": 4}
    yield "/v1/messages/count_tokens", {"messages": copies(turns)}
    yield "/v1/responses", {"input": "x", "tools": copies([{"type": "namespace", "name": "n", "tools": functions}])}
    yield "/v1/responses", {"input": copies([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}])}
    yield chat(messages=copies([{"role": "assistant", "content": "", "tool_calls": [numbers]}]))
    token = max(load_tokenizer(str(models.TARGET)).all_special_tokens, key=len)
    yield completion(prompt=token * ((BODY_BYTES - 1000) // len(token)))


def corpora() -> Iterator[Bomb]:
    """More corpora than a key may have; large ones, of many files; and requests that draft from them."""
    path = "/v1/outrider/corpora"
    for number in range(70):
        yield path, {"name": f"c{number}", "texts": ["x"], "default": number % 2 == 0}
    yield path, {"name": "c0", "files": [{"path": str(number), "text": ""} for number in range(BODY_BYTES // 40)]}
    yield path, {"name": "c0", "texts": copies(["x " * 100])}
    for name in ("../bystander", ".default", "c0/../../x", "", "a" * 65):
        yield path, {"name": name, "texts": ["x"]}
        yield completion(speculation={"drafter": "retrieval", "corpus": name})
    yield path, {"name": "c0", "remove": copies(["x"])}
    yield completion(prompt="x x", ignore_eos=True, speculation={"drafter": "retrieval", "corpus": "c0"})


@pytest.mark.parametrize("bombs", [structures, large_bodies, corpora])
def test_no_attack_is_a_servers_error_or_changes_another_keys_answer(server: Served, bombs: Any) -> None:
    worker = worker_of(server)
    with server.login(BOB) as bob:
        expected = complete(bob)["choices"]
        for number, (path, fields) in enumerate(bombs()):
            content = encode({"model": server.model, **fields})
            answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500 and "Traceback" not in answer.text, (fields, answer.text)
            if number % 3 == 0:  # a client that leaves before its answer
                with suppress(httpx.TimeoutException):
                    server.http.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=1e-3)
            assert complete(bob)["choices"] == expected, fields
    assert worker_of(server) == worker and not any("Traceback" in line for line in server.log)


HEAD = (
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {ALICE}\r\n"
)


def request(**fields: Any) -> bytes:
    """A whole request for an endless stream."""
    fields |= {"model": models.NAME, "temperature": 1.5, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": "x", **fields})
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()


# What clients send that then read and write nothing more.
HOLDS = {
    "nothing": b"",
    "half a head": HEAD[:60].encode(),
    "half an upload": f"{HEAD}Content-Length: {BODY_BYTES}\r\n\r\n".encode() + b"[" * (BODY_BYTES // 2),
    "half an upload without a key": f"{HEAD.replace(ALICE, 'wrong')}Content-Length: {BODY_BYTES}\r\n\r\n{{".encode(),
    "half a chunk": f'{HEAD}Transfer-Encoding: chunked\r\n\r\n5\r\n{{"a":\r\n'.encode(),
    "a stream": request(),
    "a stream of a long text": request(prompt=[5] * 1000, logprobs=20),
    "a stream of many choices": request(n=16),
    "a pipeline": request() * 50,
}


@pytest.mark.parametrize("content", HOLDS.values(), ids=HOLDS)
def test_clients_that_stand_still_keep_no_other_waiting(server: Served, content: bytes) -> None:
    parts = urlsplit(server.url)
    with ExitStack() as held, server.login(BOB) as bob:
        for _ in range(16):
            connection = held.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(1)
            connection.connect((parts.hostname, parts.port))
            with suppress(OSError):  # the server may take no more of it
                connection.sendall(content)
        assert len(complete(bob)["choices"]) == 1
        assert server.http.get("/health").status_code == 200
