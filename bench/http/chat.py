"""A client of chat completions: streams an answer and times its chunks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from bench.plan import BenchError


@dataclass(frozen=True)
class Answer:
    """The answer of a server, or of another program."""

    tokens: int
    seconds: float  # prompt included
    steps: int | None = None  # forwards that emitted tokens, if the peer counts them
    first_token_seconds: float | None = None  # from the start; None without streaming
    text: str | None = None  # None in process
    first_text: str = ""  # the part of the text that came first

    @property
    def rate(self) -> float:
        """Tokens per second after the first one, of a stream; 0 if most of the text came at once, such as a call of a tool."""
        rest = self.seconds - (self.first_token_seconds or 0.0)
        is_held_back = 2 * len(self.first_text) > len(self.text or "") > 0
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 and not is_held_back else 0.0


def ask(client: httpx.Client, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """Streams an answer; parses it after its end, to disturb the server least. Raises BenchError if it is refused."""
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    started, arrived = time.perf_counter(), list[tuple[float, bytes]]()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            for data in response.iter_bytes():
                arrived.append((time.perf_counter() - started, data))
    except httpx.TransportError as error:
        raise BenchError(f"A server did not answer: {error}.") from None
    received = b"".join(data for _, data in arrived)
    if response.status_code != 200:
        raise BenchError(f"A server answered {response.status_code}: {received.decode()[:200]}")
    return read(arrived)


def read(arrived: list[tuple[float, bytes]]) -> Answer:
    """The answer of a stream, from its pieces and the seconds at which they arrived. Raises BenchError if it holds an error."""
    text, first_text, first, usage, steps, rest = "", "", None, dict[str, Any](), None, b""
    for seconds, data in arrived:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            if "error" in chunk:
                raise BenchError(f"A server ended an answer with an error: {chunk['error']['message']}")
            for choice in chunk.get("choices", ()):
                content = text_of(choice.get("delta") or {})
                text += content
                first = seconds if first is None and (content or choice.get("token_ids")) else first
                first_text = text if seconds == first else first_text
            usage = chunk.get("usage") or usage
            steps = count_steps(chunk, usage) or steps
    if not usage:
        raise BenchError("A server ended an answer without its usage.")
    total = arrived[-1][0]
    return Answer(usage["completion_tokens"], total, steps, first or total, text, first_text)


def text_of(delta: Mapping[str, Any]) -> str:
    """The text that a chunk adds to an answer, reasoning and calls of tools included."""
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    called = "".join(f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls)
    return f"{delta.get('reasoning_content') or ''}{delta.get('content') or ''}{called}"


def count_steps(chunk: Mapping[str, Any], usage: Mapping[str, Any]) -> int | None:
    """Forwards that emitted tokens: Outrider reports them; of llama-server's tokens, those that were not drafted."""
    if "speculation" in chunk:
        return int(chunk["speculation"]["steps"])
    if "timings" in chunk and usage:  # without drafts, each token is a step
        return int(usage["completion_tokens"]) - int(chunk["timings"].get("draft_n_accepted", 0))
    return None
