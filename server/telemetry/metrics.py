"""All Prometheus metrics; every name is defined here.

Each server has its own registry, so two servers in one process do not share counters. No label holds a client's value.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.drafters.interface import MAX_NODES
from outrider.server.engine.fair_queue import Queue
from outrider.server.engine.messages import Ready, Reuse, Status, StepReport

# Caches are reused token by token; this is only how finely a picker indexes the prompts that it has sent to a pod.
BLOCK_TOKENS = 16


@dataclass(eq=False)
class PickerGauges(Collector):
    """The gauges of a worker that an endpoint picker reads from each pod; none before its model is loaded.

    The model server protocol of the Gateway API inference extension says what each means. The names are vLLM's, which pickers
    read from every pod whose labels name no other engine, also llm-d's.
    """

    running: int = 0  # requests
    waiting: int = 0
    kv_cache_usage_ratio: float = 0.0  # of running requests: idle sessions make room
    blocks: int | None = None  # of BLOCK_TOKENS, in the KV caches on the device; None before the model is loaded
    adapters: str = ""  # names of the LoRA adapters; all are kept in memory
    adapter_count: int = 0
    loaded_at: float = 0.0  # seconds since 1970

    def record_model(self, model: Ready, adapters: Iterable[str]) -> None:
        """Sets what stays as long as the model."""
        names = list(adapters)
        self.blocks, self.loaded_at = model.slots * model.context_tokens // BLOCK_TOKENS, time.time()
        self.adapters, self.adapter_count = ",".join(names), len(names)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self.blocks is None:
            return
        yield GaugeMetricFamily("vllm:num_requests_running", "Running requests.", self.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Waiting requests.", self.waiting)
        usage = "Share of the KV cache positions that running requests hold."
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", usage, self.kv_cache_usage_ratio)
        cache = GaugeMetricFamily("vllm:cache_config_info", "Size of the KV caches.", labels=("block_size", "num_gpu_blocks"))
        cache.add_metric((str(BLOCK_TOKENS), str(self.blocks)), 1)
        yield cache
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        lora = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters in memory, and since when.", labels=labels)
        lora.add_metric((str(self.adapter_count), self.adapters, ""), self.loaded_at)
        yield lora


LATENCY_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
# A long prompt on a CPU takes minutes.
REQUEST_BUCKETS = (*LATENCY_BUCKETS, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)
PHASE_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0003, *LATENCY_BUCKETS)
TOKEN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128)
# The reasons for which a request is refused or ended early.
REFUSALS = ("queue_full", "tokens", "concurrency", "rate", "deadline", "draining", "unread")
# The reasons for which the server closes a connection: too many, READ_SECONDS and WRITE_SECONDS of `http.protocol`.
CLOSINGS = ("full", "late", "stalled")
FAILURES = ("500", "503", "529")
SNAPSHOT_SECONDS = 10.0


def makers(registry: CollectorRegistry) -> tuple[Callable[..., Counter], Callable[..., Gauge], Callable[..., Histogram]]:
    options: dict[str, Any] = {"namespace": "outrider", "registry": registry}
    return partial(Counter, **options), partial(Gauge, **options), partial(Histogram, **options)


class Metrics:
    """The server's counters, gauges and histograms.

    With `coarse`, readers see a snapshot that is renewed every SNAPSHOT_SECONDS at most. Current values would show the draft
    acceptance of a running answer step by step, which `server.coalesce_ms` hides.
    """

    def __init__(self, coarse: bool = False) -> None:
        self._coarse = coarse
        self._snapshot, self._snapshot_time = b"", -math.inf
        self.registry = CollectorRegistry()
        counter, gauge, histogram = makers(self.registry)
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", buckets=REQUEST_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between tokens of an answer, per token.", buckets=LATENCY_BUCKETS
        )
        self.request_duration = histogram(
            "request_duration_seconds", "From the request's arrival to its last token.", buckets=REQUEST_BUCKETS
        )
        self.queue = histogram(
            "queue_seconds", "From the request's arrival to its start in the worker.", buckets=REQUEST_BUCKETS
        )
        self.step = histogram("step_seconds", "One decoding step, by phase.", ["phase"], buckets=PHASE_BUCKETS)
        self._draft, self._verify, self._commit = (self.step.labels(phase) for phase in ("draft", "verify", "commit"))
        self.tokens_per_step = histogram("tokens_per_step", "Tokens emitted per target forward.", buckets=TOKEN_BUCKETS)
        self.requests = counter("requests_total", "Requests answered, by endpoint and status.", ["endpoint", "status"])
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of all requests.")
        self.cached_prompt_tokens = counter("cached_prompt_tokens_total", "Prompt tokens found in a session's KV cache.")
        self.generated_tokens = counter("generated_tokens_total", "Tokens emitted.")
        self.steps = counter("steps_total", "Decoding steps: target forwards that emitted tokens.")
        self.draft_tokens = counter("draft_tokens_total", "Draft nodes verified, by drafter.", ["drafter"])
        self.accepted_tokens = counter("accepted_tokens_total", "Draft nodes accepted, by drafter.", ["drafter"])
        self.accepted_per_position = counter(
            "accepted_tokens_per_position_total", "Draft nodes accepted, by their depth in the draft.", ["position"]
        )
        self._positions = [self.accepted_per_position.labels(str(1 + i)) for i in range(MAX_NODES)]
        self.worker_restarts = counter("worker_restarts_total", "Restarts of the worker process.")
        self.worker_ready = gauge("worker_ready", "Whether a worker serves requests (1) or is missing or loading (0).")
        self.model_info = gauge(
            "model_info",
            "The model that the worker serves: 1, with the data types of model and cache, and the mean bits per weight.",
            ["dtype", "weight_bits", "kv_dtype"],
        )
        self._add_server(counter, gauge)

    def _add_server(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Adds metrics of the queue, the connections, the sessions and the memory."""
        self.rejected_requests = counter(
            "rejected_requests_total", "Requests refused, or ended at their deadline, by reason.", ["reason"]
        )
        self.closed_connections = counter(
            "closed_connections_total", "Connections closed by the server because of a bound, by reason.", ["reason"]
        )
        self.running = gauge("requests_running", "Running requests.")
        self.waiting = gauge("requests_waiting", "Waiting requests.")
        self.session_requests = counter(
            "session_requests_total", "Requests by how they came by their session: new, continued or forked.", ["reuse"]
        )
        self.sessions = gauge("sessions", "Sessions in the worker.")
        self.corpora = gauge("corpora", "Corpora that clients have posted.")
        self.corpora_bytes = gauge("corpora_bytes", "Size of their indexes.")
        self.kv_cache_usage = gauge("kv_cache_usage_ratio", "Share of the KV cache positions in use.")
        self._picker = PickerGauges()
        self.registry.register(self._picker)
        self.last_progress = gauge("last_progress_timestamp_seconds", "Unix time of the worker's last message.")
        counted = (self.rejected_requests, self.closed_connections, self.session_requests)
        # They start at zero, so that the first event shows as an increase.
        for metric, values in zip(counted, (REFUSALS, CLOSINGS, get_args(Reuse)), strict=True):
            for value in values:
                metric.labels(value)

    def record_answer(self, endpoint: str, status: int) -> None:
        """Counts a response. Failures of its endpoint start at zero, so that the first one shows as an increase."""
        for failure in FAILURES:
            self.requests.labels(endpoint, failure)
        self.requests.labels(endpoint, str(status)).inc()

    def record_step(self, step: StepReport, tokens: int) -> None:
        """Counts one step that emitted `tokens`."""
        self._draft.observe(step.draft_seconds)
        self._verify.observe(step.verify_seconds)
        self._commit.observe(step.commit_seconds)
        self.steps.inc()
        self.generated_tokens.inc(tokens)
        self.tokens_per_step.observe(tokens)
        for drafter, nodes in step.drafted.items():
            self.draft_tokens.labels(drafter).inc(nodes)
            self.accepted_tokens.labels(drafter).inc(step.accepted.get(drafter, 0))  # zero also creates the series
        for position in self._positions[: sum(step.accepted.values())]:
            position.inc()

    def record_queue(self, queue: Queue) -> None:
        self.running.set(queue.active)
        self.waiting.set(queue.waiting)
        self._picker.running, self._picker.waiting = queue.active, queue.waiting

    def record_model(self, model: Ready, adapters: Iterable[str] = ()) -> None:
        """Sets the labels of the served model and its LoRA adapters."""
        self._picker.record_model(model, adapters)
        self.model_info.clear()
        self.model_info.labels(model.dtype, str(model.weight_bits), model.kv_dtype).set(1)

    def record_status(self, status: Status) -> None:
        """Sets the worker's gauges."""
        self.sessions.set(status.sessions)
        self.kv_cache_usage.set(status.kv_cache_usage_ratio)
        self._picker.kv_cache_usage_ratio = status.running_usage_ratio

    async def read(self) -> bytes:
        """The metrics in Prometheus' text format, for a page that may come from elsewhere."""
        return self.render()

    def render(self) -> bytes:
        if not self._coarse:
            return generate_latest(self.registry)
        if time.monotonic() - self._snapshot_time >= SNAPSHOT_SECONDS:
            self._snapshot, self._snapshot_time = generate_latest(self.registry), time.monotonic()
        return self._snapshot


class EncoderMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, _, histogram = makers(self.registry)
        self.texts = counter("encoded_texts_total", "Texts embedded, and documents scored.")
        self.tokens = counter("encoded_tokens_total", "Tokens of these texts.")
        self.seconds = histogram("encoding_seconds", "Time of one batch of texts.", buckets=LATENCY_BUCKETS)

    def record(self, texts: int, tokens: int, seconds: float) -> None:
        self.texts.inc(texts)
        self.tokens.inc(tokens)
        self.seconds.observe(seconds)
