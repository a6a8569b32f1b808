"""What an endpoint picker reads from each pod, to route requests among plain pods.

The model server protocol of the Gateway API inference extension says what each gauge means. The names are vLLM's, which
pickers read from every pod whose labels name no other engine, also llm-d's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.server.engine.messages import Ready

# Caches are reused token by token; this is only how finely a picker indexes the prompts that it has sent to a pod.
BLOCK_TOKENS = 16


@dataclass(eq=False)
class PickerGauges(Collector):
    """The gauges of a worker; none before its model is loaded."""

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
