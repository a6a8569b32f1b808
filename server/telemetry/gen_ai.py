"""OpenTelemetry's conventions for generative AI: the attributes of a request's span, and the metrics of a model server.

Names, units and buckets are those of semantic-conventions-genai 0.1. Promises that no attribute holds what clients write: the
model is the server's own name, not the one that was asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.engine.messages import Request

PROVIDER = "outrider"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
# Of what the request log shows of an answer.
USAGE = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


def models(name: str) -> dict[str, Any]:
    """The attributes of the model that answers."""
    return {"gen_ai.request.model": name, "gen_ai.response.model": name}


def of_request(request: Request, model: str, choices: int, stream: bool) -> dict[str, Any]:
    """The attributes of a request for generated text. `model`: what answers where the request names no adapter."""
    several = {"gen_ai.request.choice.count": choices} if choices != 1 else {}
    return {
        **models(request.adapter or model),
        **several,
        "gen_ai.request.stream": stream,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.params.temperature,
        "gen_ai.request.top_p": request.params.top_p,
    }


def of_answer(state: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a request and its answer. `state`: what the endpoints recorded of it."""
    stats, found = state.get("stats", {}), dict(state.get("gen_ai", {}))
    found |= {name: stats[own] for own, name in USAGE.items() if own in stats}
    if finish := stats.get("finish"):
        found["gen_ai.response.finish_reasons"] = finish.split(",")
    if found.get("gen_ai.request.stream") and "first_token_ms" in stats:
        found["gen_ai.response.time_to_first_chunk"] = stats["first_token_ms"] / 1e3
    return found


class ServerMetrics:
    def __init__(self, meter: Any) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}", unit="s", description=text, explicit_bucket_boundaries_advisory=buckets
            )

        self._duration = histogram("request.duration", "From the request's arrival to its last byte.", DURATION_BUCKETS)
        self._first_token = histogram(
            "time_to_first_token", "From the request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._token = histogram("time_per_output_token", "Mean time of a token after the first one.", TOKEN_BUCKETS)

    def record(self, operation: str, state: Mapping[str, Any], seconds: float, status: int) -> None:
        """Counts a request. `status`: of the HTTP response."""
        models = {name: value for name, value in state.get("gen_ai", {}).items() if name.endswith(".model")}
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, **models}
        failure = {"error.type": str(status)} if status >= 400 else {}
        self._duration.record(seconds, attributes | failure)
        stats = state.get("stats", {})
        if not failure and "first_token_ms" in stats:
            first = stats["first_token_ms"] / 1e3
            self._first_token.record(first, attributes)
            if (tokens := stats.get("completion_tokens", 0)) > 1:
                self._token.record(max(0.0, seconds - first) / (tokens - 1), attributes)
