"""`python -m bench.hostile`: ten thousand requests that mean harm or nothing, made by lot.

Sizes, types, encodings, headers, forged hosts, broken HTTP. What must not happen: a 500, an answer that does not come, a
worker that is replaced, a server that serves nobody afterwards.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console
from rich.progress import Progress

from bench import report
from bench.http.client import metric, model_of, new_client, quantiles, whole
from bench.http.serve import server

AT_ONCE = 16
PATIENCE_SECONDS = 60.0
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
KEY = "a-key-for-this-run"
HARMLESS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x = ", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
FIELDS = (
    *(
        "prompt",
        "messages",
        "input",
        "tokens",
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "stop",
        "stream",
    ),
    *(
        "stream",
        "max_tokens",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "best_of",
        "echo",
        "suffix",
        "tools",
        "tool_choice",
        "user",
    ),
    *("response_format", "regex", "grammar", "choice", "prediction", "speculation", "session_id", "metadata", "priority"),
    *("chat_template", "chat_template_kwargs", "stop_token_ids", "min_tokens", "previous_response_id", "instructions"),
)


def value(lots: random.Random, depth: int = 0) -> Any:
    """Something that a field does not expect."""
    kinds: list[Any] = [
        *(None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 1e308, float("inf"), float("nan"), -0.0, 10**40),
        *("", "\0", "\ud800", "🙂" * 50, "../../etc/passwd", "<|im_start|>system", "{{7*7}}", "A" * 5000, "\r\nX: y", "%00"),
        *([], {}, [[]], [None], {"": ""}, {"type": "json_schema"}, {"$ref": "#"}, "(a+)+$", "(" * 500, "[" * 500),
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"$ref": "#"}}},
        {
            "type": "function",
            "function": {"name": "../x", "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
        },
    ]
    if depth < 6 and lots.random() < 0.2:
        return [value(lots, depth + 1) for _ in range(lots.randrange(4))]
    if depth < 6 and lots.random() < 0.1:
        return {str(value(lots, depth + 1))[:20]: value(lots, depth + 1) for _ in range(lots.randrange(4))}
    if lots.random() < 0.02:
        return nested(lots.choice((50, 1000, 20_000)))
    return lots.choice(kinds)


def nested(levels: int) -> str:
    """A list so deep that it must be text already; `encode` puts it in as it is."""
    return "RAW" + "[" * levels + "]" * levels


def encode(body: Any) -> bytes:
    """JSON as a careless client writes it: with NaN, lone surrogates and lists of any depth."""
    text = json.dumps(body)
    start = text.find('"RAW')
    while start >= 0:
        stop = text.index('"', start + 1)
        text = text[:start] + text[start + 4 : stop] + text[stop + 1 :]
        start = text.find('"RAW')
    return text.encode("utf-8", "surrogatepass")


def mutated(lots: random.Random, path: str, model: str) -> bytes:
    """A body that was right once."""
    body: dict[str, Any] = {"model": model, **HARMLESS[path]}
    for _ in range(lots.randint(1, 3)):
        body[lots.choice(FIELDS)] = value(lots)
    content = encode(body)
    kind = lots.random()
    if kind < 0.05:
        return content[: lots.randrange(len(content))]
    if kind < 0.1:
        return bytes(lots.randrange(256) for _ in range(lots.randrange(300)))
    if kind < 0.13:
        return gzip.compress(content)
    if kind < 0.15:
        return content.decode("utf-8", "replace").encode("utf-16")
    return content


def headers(lots: random.Random) -> dict[str, str]:
    """Forged, huge, wrong or missing."""
    found = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    odd = {
        "Host": lots.choice(("localhost/v1/models", "evil.example", "127.0.0.1:1@x", "a" * 300, "[::1", "")),
        "Authorization": lots.choice(("", "Bearer", "Bearer " + "k" * 9000, "Basic eDp5", f"Bearer {KEY}x", "Bearer ü")),
        "Content-Type": lots.choice(("text/plain", "application/xml", "multipart/form-data", "application/json; charset=x")),
        "X-Request-Id": lots.choice(("../..", "a" * 5000, "<script>", "{}")),
        "X-Session-Id": lots.choice(("../../x", "s" * 9000, "\t")),
        "X-Forwarded-For": "127.0.0.1",
        "Content-Encoding": lots.choice(("gzip", "br", "nonsense")),
        "Accept": "image/png",
        "Cookie": "a=" + "b" * 8000,
        "Expect": "100-continue",
    }
    for name in lots.sample(list(odd), lots.randrange(3)):
        found[name] = odd[name].encode("ascii", "ignore").decode()
    return found


def broken(lots: random.Random, host: str) -> bytes:
    """Bytes that are no HTTP, or almost none."""
    line = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n".encode()
    return lots.choice(
        (
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
            b"POST /v1/completions\r\n\r\n",
            line + b"Content-Length: -5\r\n\r\n{}",
            line + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n{}",
            line + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
            line + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
            line + b"Content-Length: 100000000000\r\n\r\n{}",
            line + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            line + b"X: y\r\n" * 5000 + b"\r\n",
            b"\0" * 500,
            b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            b"GET //v1/models HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n",
        )
    )


async def raw(url: str, content: bytes) -> str:
    """What the server says to bytes; the client goes away after a second without an answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(content)
        await writer.drain()
        first = await asyncio.wait_for(reader.readline(), 1.0)
        words = first.decode("latin-1").split(" ")
        return words[1] if len(words) > 1 else "closed"
    except TimeoutError:
        return "waits"  # for the rest of the request, as it must
    except OSError:
        return "closed"
    finally:
        writer.close()


async def attack(url: str, requests: int, seed: int) -> dict[str, Any]:
    """All of them, some at once."""
    lots = random.Random(seed)
    statuses: Counter[str] = Counter()
    seconds: list[float] = []
    bad: list[str] = []
    turns = iter(range(requests))
    async with new_client(url) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        model = await model_of(client)
        with Progress() as progress:
            task = progress.add_task("attacking", total=requests)

            async def one() -> None:
                for _ in turns:
                    started = time.perf_counter()
                    if lots.random() < 0.1:
                        statuses["raw " + await raw(url, broken(lots, urlsplit(url).netloc))] += 1
                    else:
                        path = lots.choice(PATHS)
                        content = mutated(lots, path, model)
                        method = "POST" if lots.random() < 0.95 else lots.choice(METHODS)
                        path += lots.choice(("", "", "", "", "/..", "?x=" + "y" * 2000, "/%2e%2e/%2e%2e/etc/passwd"))
                        await send(client, method, path, content)
                    seconds.append(time.perf_counter() - started)
                    progress.advance(task)

            async def send(client: httpx.AsyncClient, method: str, path: str, content: bytes) -> None:
                try:
                    response = await client.request(
                        method, path, content=content, headers=headers(lots), timeout=PATIENCE_SECONDS
                    )
                    statuses[str(response.status_code)] += 1
                    if response.status_code >= 500 or "Traceback" in response.text:
                        bad.append(f"{response.status_code} {method} {path[:80]} {content[:300]!r}")
                except httpx.TimeoutException:
                    statuses["hangs"] += 1
                    bad.append(f"hangs {method} {path[:80]} {content[:300]!r}")
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    statuses[type(error).__name__] += 1

            await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        after = await whole(client, {"model": model, "prompt": "def f(", "max_tokens": 4})
        return {
            "requests": requests,
            "statuses": dict(sorted(statuses.items())),
            "bad": bad[:20],
            "worker_restarts": await metric(client, "outrider_worker_restarts_total"),
            "answer_afterwards": after.status,
            "milliseconds": quantiles(seconds),
        }


def main(
    requests: Annotated[int, typer.Option(help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the lots.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = report.RESULTS / "hostile.json",
) -> None:
    """Attacks a server of its own. Exit code 1 where something happened that must not."""
    config = Path(__file__).parent / "hostile.yaml"
    with server(["--config", str(config)]) as own:
        figures = asyncio.run(attack(own.url, requests, seed))
    Console().print(figures)
    report.save(out, figures)
    if figures["bad"] or figures["worker_restarts"] or figures["answer_afterwards"] != 200:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
