"""A server that is measured, by its URL."""

from __future__ import annotations

from typing import Any

import httpx

from bench.http.chat import Answer, ask
from bench.pair.prompts import Question
from bench.plan import BenchError

TIMEOUT_SECONDS = 3600.0


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
        found, build = self._get("/version"), self._get("/props").get("build_info")
        self._is_outrider = "invariant_rows" in found
        program = f"{'Outrider' if self._is_outrider else ''} {found.get('version', '')}".strip()
        self.program = f"llama.cpp {build}" if build else program or "a server"

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
        report = {"speculation": {"report": True}} if self._is_outrider else {}
        return ask(self._client, body | {"seed": seed} | question.fields | report)
