"""The error of a server's log-probabilities: of any that speaks OpenAI's completions API, or llama-server's form of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import httpx
from rich.progress import track

from bench.plan import BenchError

TIMEOUT_SECONDS = 600.0


class Place(NamedTuple):
    """The end of a text, and the log-probabilities that its likeliest next tokens should have."""

    prompt: list[int]
    logs: Mapping[str, float]  # log-probabilities by the texts of tokens


def measure(url: str, places: Sequence[Place]) -> dict[str, Any]:
    """The mean and the largest error of a server's log-probabilities at these places. Raises BenchError."""
    with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=TIMEOUT_SECONDS) as client:
        name = str(ask(client, "GET", "/v1/models")["data"][0]["id"])
        errors = []
        for place in track(places, f"asking {url}"):
            body = {"model": name, "prompt": place.prompt, "max_tokens": 1, "temperature": 0, "logprobs": len(place.logs)}
            given = ask(client, "POST", "/v1/completions", body)["choices"][0]["logprobs"]
            errors += [abs(value - place.logs[text]) for text, value in by_text(given).items() if text in place.logs]
    if not errors:
        raise BenchError(f"{url} tells no log-probabilities of the tokens that are compared.")
    figures = {"error": round(fmean(errors), 5), "largest": round(max(errors), 5)}
    return {"url": url, "model": name, "places": len(places), "compared": len(errors)} | figures


def by_text(given: Any) -> dict[str, float]:
    """The log-probabilities of the first token by the texts of tokens, from OpenAI's form or llama-server's."""
    if isinstance(given, dict) and given.get("content"):
        return {str(each["token"]): float(each["logprob"]) for each in given["content"][0]["top_logprobs"]}
    return {str(text): float(value) for text, value in given["top_logprobs"][0].items()} if given else {}


def ask(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer. Raises BenchError."""
    try:
        response = client.request(method, path, json=body)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise BenchError(f"{client.base_url}{path} does not answer as a server of OpenAI's API: {error}") from None
