"""`python -m bench.hostile`: ten thousand random malformed and malicious requests.

Sizes, types, encodings, headers, forged hosts, broken HTTP. The run fails on a 5xx, on a request that hangs, on a worker
restart, and if the server does not answer a valid request afterwards.
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
from bench.http.client import complete, metric, new_client, quantiles, served_model
from bench.http.process import start_server

CLIENTS = 16
HANG_SECONDS = 60.0
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
KEY = "a-key-for-this-run"
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x = ", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
FIELDS = [
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
    "response_format",
    "regex",
    "grammar",
    "choice",
    "prediction",
    "speculation",
    "session_id",
    "metadata",
    "priority",
    "chat_template",
    "chat_template_kwargs",
    "stop_token_ids",
    "min_tokens",
    "previous_response_id",
    "instructions",
]  # `stream` twice: it is chosen twice as often


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """A random value that few fields accept."""
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
    if depth < 6 and rng.random() < 0.2:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 6 and rng.random() < 0.1:
        return {str(odd_value(rng, depth + 1))[:20]: odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if rng.random() < 0.02:
        return nested(rng.choice((50, 1000, 20_000)))
    return rng.choice(kinds)


def nested(levels: int) -> str:
    """A list too deep for the json module, as a marked string that `encode` writes without quotes."""
    return "RAW" + "[" * levels + "]" * levels


def encode(body: Any) -> bytes:
    """Serializes like a careless client: with NaN, lone surrogates and lists of any depth."""
    text = json.dumps(body)
    start = text.find('"RAW')
    while start >= 0:
        stop = text.index('"', start + 1)
        text = text[:start] + text[start + 4 : stop] + text[stop + 1 :]
        start = text.find('"RAW')
    return text.encode("utf-8", "surrogatepass")


def mutated(rng: random.Random, path: str, model: str) -> bytes:
    """A valid body with random fields replaced, at times cut off, compressed or in another encoding."""
    body: dict[str, Any] = {"model": model, **VALID[path]}
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = odd_value(rng)
    content = encode(body)
    kind = rng.random()
    if kind < 0.05:
        return content[: rng.randrange(len(content))]
    if kind < 0.1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(300)))
    if kind < 0.13:
        return gzip.compress(content)
    if kind < 0.15:
        return content.decode("utf-8", "replace").encode("utf-16")
    return content


def odd_headers(rng: random.Random) -> dict[str, str]:
    """Valid headers, with up to two of them forged, huge, wrong or missing."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    odd = {
        "Host": rng.choice(("localhost/v1/models", "evil.example", "127.0.0.1:1@x", "a" * 300, "[::1", "")),
        "Authorization": rng.choice(("", "Bearer", "Bearer " + "k" * 9000, "Basic eDp5", f"Bearer {KEY}x", "Bearer ü")),
        "Content-Type": rng.choice(("text/plain", "application/xml", "multipart/form-data", "application/json; charset=x")),
        "X-Request-Id": rng.choice(("../..", "a" * 5000, "<script>", "{}")),
        "X-Session-Id": rng.choice(("../../x", "s" * 9000, "\t")),
        "X-Forwarded-For": "127.0.0.1",
        "Content-Encoding": rng.choice(("gzip", "br", "nonsense")),
        "Accept": "image/png",
        "Cookie": "a=" + "b" * 8000,
        "Expect": "100-continue",
    }
    for name in rng.sample(list(odd), rng.randrange(3)):
        headers[name] = odd[name].encode("ascii", "ignore").decode()
    return headers


def broken_http(rng: random.Random, host: str) -> bytes:
    """Bytes that are not valid HTTP."""
    line = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n".encode()
    return rng.choice(
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


async def send_raw(url: str, content: bytes) -> str:
    """Sends bytes; returns the status code, "closed", or "waits" if there is no answer within a second."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(content)
        await writer.drain()
        first = await asyncio.wait_for(reader.readline(), 1.0)
        words = first.decode("latin-1").split(" ")
        return words[1] if len(words) > 1 else "closed"
    except TimeoutError:
        return "waits"  # for the rest of the request
    except OSError:
        return "closed"
    finally:
        writer.close()


class Attack:
    """One run against one server."""

    def __init__(self, url: str, requests: int, seed: int) -> None:
        self._url = url
        self._requests = requests
        self._rng = random.Random(seed)
        self._statuses: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._bad: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Sends all requests from CLIENTS concurrent clients, then a valid one; returns the figures."""
        turns = iter(range(self._requests))
        async with new_client(self._url) as client:
            client.headers["Authorization"] = f"Bearer {KEY}"
            model = await served_model(client)
            with Progress() as progress:
                task = progress.add_task("attacking", total=self._requests)

                async def run_client() -> None:
                    for _ in turns:
                        await self._send_one(client, model)
                        progress.advance(task)

                await asyncio.gather(*(run_client() for _ in range(CLIENTS)))
            after = await complete(client, {"model": model, "prompt": "def f(", "max_tokens": 4})
            return {
                "requests": self._requests,
                "statuses": dict(sorted(self._statuses.items())),
                "bad": self._bad[:20],
                "worker_restarts": await metric(client, "outrider_worker_restarts_total"),
                "answer_afterwards": after.status,
                "milliseconds": quantiles(self._seconds),
            }

    async def _send_one(self, client: httpx.AsyncClient, model: str) -> None:
        rng, started = self._rng, time.perf_counter()
        if rng.random() < 0.1:
            status = await send_raw(self._url, broken_http(rng, urlsplit(self._url).netloc))
            self._statuses[f"raw {status}"] += 1
        else:
            path = rng.choice(PATHS)
            content = mutated(rng, path, model)
            method = "POST" if rng.random() < 0.95 else rng.choice(METHODS)
            path += rng.choice(("", "", "", "", "/..", "?x=" + "y" * 2000, "/%2e%2e/%2e%2e/etc/passwd"))
            await self._send(client, method, path, content)
        self._seconds.append(time.perf_counter() - started)

    async def _send(self, client: httpx.AsyncClient, method: str, path: str, content: bytes) -> None:
        headers = odd_headers(self._rng)
        try:
            response = await client.request(method, path, content=content, headers=headers, timeout=HANG_SECONDS)
            self._statuses[str(response.status_code)] += 1
            if response.status_code >= 500 or "Traceback" in response.text:
                self._bad.append(f"{response.status_code} {method} {path[:80]} {content[:300]!r}")
        except httpx.TimeoutException:
            self._statuses["hangs"] += 1
            self._bad.append(f"hangs {method} {path[:80]} {content[:300]!r}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._statuses[type(error).__name__] += 1


def main(
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the random requests.")] = 0,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "hostile.json",
) -> None:
    """Start a server and attack it. Exit code 1 if the run fails."""
    config = Path(__file__).parent / "hostile.yaml"
    with start_server(["--config", str(config)]) as server:
        figures = asyncio.run(Attack(server.url, requests, seed).run())
    Console().print(figures)
    report.save(out, figures)
    if figures["bad"] or figures["worker_restarts"] or figures["answer_afterwards"] != 200:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
