"""The figures of a running server, from its answers to /version, /v1/models, /ready and /metrics. Knows nothing of a screen."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from outrider.server.engine.messages import Memory
from outrider.server.terminal.client import ChatError, Client, NoServer, one_line

# Why the metrics are missing, by the status of the answer.
NO_METRICS: dict[int | None, str] = {
    401: "The figures need the server's metrics.key; give it with --metrics-key.",
    404: "The figures are at the server's metrics.port; give that address with --metrics-url.",
}


@dataclass(frozen=True)
class Reading:
    """What a server has told at one moment."""

    seconds: float  # of a monotonic clock
    version: Mapping[str, Any]
    state: str  # of the server
    cards: Sequence[Mapping[str, Any]]  # of /v1/models; empty without the right key
    samples: Sequence[Sample]  # of /metrics; empty if they are not shown
    notes: Sequence[str]  # why something is missing, one sentence each


@dataclass(frozen=True)
class ModelFigures:
    """One model. Shares are from 0 to 1; None where the server has not told, or has not counted anything yet."""

    name: str
    state: str
    context_tokens: int | None
    running: int | None = None  # streams that are answered now
    waiting: int | None = None
    tokens_per_second: float | None = None  # between two readings, all streams together
    tokens_per_step: float | None = None  # since the start
    reused: float | None = None  # the share of prompt tokens found in a cache, since the start
    cache_used: float | None = None
    sessions: int | None = None


@dataclass(frozen=True)
class ServerFigures:
    url: str
    version: str
    memory: Memory | None
    models: Sequence[ModelFigures]
    notes: Sequence[str]


def read(client: Client, metrics_client: Client) -> Reading:
    """Asks a server. Raises ChatError if there is none, or if it answers nothing of what was asked."""
    notes: list[str] = []

    def ask(question: Callable[[], Any], missing: Any, reasons: Mapping[int | None, str] | None = None) -> Any:
        try:
            return question()
        except NoServer:
            raise
        except ChatError as error:
            notes.append((reasons or {}).get(error.status, str(error)))
            return missing

    version = ask(client.version, {})
    state = ask(client.state, "unknown")
    cards = ask(client.cards, [])
    text = ask(metrics_client.metrics, "", NO_METRICS)
    if len(notes) == 4:
        raise ChatError(notes[0])
    samples = parse(text)
    if text and not samples:
        notes.append("The server's metrics are not Outrider's.")
    version = version if isinstance(version, dict) else {}
    return Reading(time.monotonic(), version, state, cards, samples, notes)


def parse(text: str) -> list[Sample]:
    """Outrider's samples in Prometheus' text format; none if it is another text."""
    try:
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return [each for each in samples if each.name.startswith("outrider_") and math.isfinite(each.value)]
    except Exception:  # the parser raises whatever the text makes it stumble over
        return []


def figures(url: str, now: Reading, before: Reading | None = None) -> ServerFigures:
    """The figures of a reading; tokens per second are those since the one `before`."""
    several = [card for card in now.cards if isinstance(card.get("status"), Mapping) and "parent" not in card]
    models = [model_figures(card, str(card["id"]), now, before) for card in several]
    if not several:
        card = now.cards[0] if now.cards else {"id": "?"}
        models = [model_figures(card, None, now, before)]
    try:
        memory = msgspec.convert(now.version.get("memory"), Memory)
    except msgspec.ValidationError:
        memory = None
    return ServerFigures(url, one_line(str(now.version.get("version", "?"))), memory, models, now.notes)


def model_figures(card: Mapping[str, Any], label: str | None, now: Reading, before: Reading | None) -> ModelFigures:
    """The figures of the model whose samples have this `model` label."""

    def count(name: str, reading: Reading = now) -> float | None:
        values = [
            each.value for each in reading.samples if each.name == f"outrider_{name}" and each.labels.get("model") == label
        ]
        return sum(values) if values else None

    def whole(name: str) -> int | None:
        found = count(name)
        return None if found is None else round(found)

    def share(part: str, whole: str) -> float | None:
        found, total = count(part), count(whole)
        return found / total if found is not None and total else None

    rate, tokens = None, count("generated_tokens_total")
    earlier = before and count("generated_tokens_total", before)
    if before is not None and tokens is not None and now.seconds > before.seconds:
        rate = max(0.0, tokens - (earlier or 0.0)) / (now.seconds - before.seconds)
    state = one_line(str(card["status"].get("value"))) if label else now.state
    return ModelFigures(
        name=one_line(str(card["id"])),
        state=state,
        context_tokens=context if isinstance(context := card.get("max_model_len"), int) else None,
        running=whole("requests_running"),
        waiting=whole("requests_waiting"),
        tokens_per_second=rate,
        tokens_per_step=share("generated_tokens_total", "steps_total"),
        reused=share("cached_prompt_tokens_total", "prompt_tokens_total"),
        cache_used=count("kv_cache_usage_ratio"),
        sessions=whole("sessions"),
    )
