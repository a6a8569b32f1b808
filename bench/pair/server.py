"""A server that is measured, by its URL."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from bench.pair.prompts import Question
from bench.plan import BenchError

TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Answer:
    """What a server has answered."""

    first_seconds: float  # to the first token
    seconds: float  # from the first token to the last
    tokens: int
    text: str
    steps: float | None  # forwards that emitted tokens, where the server tells

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else 0.0


class Server:
    """A server's model, and its answers. Raises BenchError for one that does not answer."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS, headers=headers)
        try:
            self.model = str(self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self.close()
            raise BenchError(f"{url} does not answer as a server of OpenAI's API ({error}); give the URL of one.") from None
        found = self._get("/version")
        self.is_outrider = "invariant_rows" in found
        build = self._get("/props").get("build_info")
        self.program = (
            f"llama.cpp {build}" if build else f"{'Outrider' if self.is_outrider else ''} {found.get('version', '')}".strip()
        )

    def close(self) -> None:
        """Ends its connections."""
        self._client.close()

    def _get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path that not every server has; empty without one."""
        try:
            found = self._client.get(path)
            answer = found.json() if found.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    @property
    def family(self) -> str:
        """The model's name without folder, ending and case: equal for servers of the same file."""
        return self.model.rpartition("/")[2].removesuffix(".gguf").casefold()

    def answer(self, question: Question, temperature: float, max_tokens: int, seed: int) -> Answer:
        """Streams an answer. Raises BenchError."""
        body = {"model": self.model, "messages": question.messages, "temperature": temperature, "max_tokens": max_tokens}
        body |= {"seed": seed, "stream": True, "stream_options": {"include_usage": True}, **question.fields}
        if self.is_outrider:
            body["speculation"] = {"report": True}
        started, times, parts = time.perf_counter(), list[float](), list[str]()
        told: dict[str, Any] = {}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise BenchError(f"{self.url} answered with {response.status_code}: {response.read().decode()[:200]}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    told |= {name: found for name in ("usage", "speculation", "timings") if (found := chunk.get(name))}
                    if (part := text_of(chunk)) is not None:
                        times.append(time.perf_counter())
                        parts.append(part)
        except (httpx.HTTPError, ValueError) as error:
            raise BenchError(f"{self.url} does not answer: {error}") from None
        if not times:
            raise BenchError(f"{self.url} answered without a token; try more --max-tokens.")
        tokens = int(told.get("usage", {}).get("completion_tokens") or len(parts))
        return Answer(times[0] - started, times[-1] - times[0], tokens, "".join(parts), steps_of(told, tokens))


def text_of(chunk: dict[str, Any]) -> str | None:
    """What a chunk adds to an answer, calls of tools included; None if it adds nothing."""
    delta = (chunk.get("choices") or [{}])[0].get("delta") or {}
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    called = "".join(f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls)
    text = f"{delta.get('reasoning_content') or ''}{delta.get('content') or ''}{called}"
    return text or None


def steps_of(told: dict[str, Any], tokens: int) -> float | None:
    """The forwards of an answer by what its chunks tell, from Outrider or llama-server; None where they do not."""
    if "speculation" in told:
        return float(told["speculation"]["steps"])
    timings = told.get("timings") or {}
    return float(tokens - timings["draft_n_accepted"]) if "draft_n_accepted" in timings else None
