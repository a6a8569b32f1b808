"""Every setting with its type, default, bounds and description, in one frozen tree. `sources` says where values come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider import models
from outrider.drafters.options import (
    MAX_NODES,
    DrafterName,
    DraftGraphOptions,
    DraftOptions,
    DraftTreeOptions,
    FusionOptions,
    LookaheadOptions,
    LookupOptions,
    Options,
    PearlOptions,
    PredictionOptions,
    RetrievalOptions,
    TrigramOptions,
)
from outrider.models import smollm2
from outrider.server.settings.access import Auth, MetricsAccess, Section, Server, is_loopback
from outrider.server.settings.devices import Devices, KVDtype, Quantize
from outrider.server.settings.model_path import ModelPath
from outrider.server.settings.tool_formats import ToolFormat
from outrider.verify.checkpoint import DEFAULT_REVISION

DEFAULT_MAX_ACTIVE = 8


class SettingsError(ValueError):
    """A setting is invalid. The message is one sentence that names the setting and the values it accepts."""


class Model(Section):
    """The target model."""

    path: ModelPath = Field(
        str(models.TARGET),
        description=f"Local folder, Hugging Face id or GGUF file; {smollm2.NAME} is the model that `make serve` installs.",
        json_schema_extra={"default": "the embedded model"},
    )
    revision: str = Field(
        DEFAULT_REVISION, min_length=1, description="Branch, tag or commit of a Hugging Face id; a commit pins the model."
    )
    name: str | None = Field(None, description="Model name in the API; null uses the last part of the path.")
    aliases: tuple[str, ...] = Field(
        (),
        description="Further names that requests may use for the model; * and ? are wildcards, and * alone allows every name.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type; auto uses the checkpoint's."
    )
    quantize: Quantize = Field(
        "none", description="Bits of the linear layers' weights, quantised while they load: int8, int4, or, on a GPU, fp8."
    )
    quantize_head: bool = Field(True, description="With quantize, also quantise the layer that computes logits, to 8 bits.")
    kv_dtype: KVDtype = Field(
        "auto", description="Data type of the cached keys and values: auto is the model's; int8 and fp8 take 1 byte a value."
    )
    device: Devices = Field(
        "auto",
        description="auto (a GPU if there is one), cpu, cuda, cuda:N, or several GPUs for the layers, such as cuda:0,cuda:1.",
    )
    context_tokens: int | None = Field(
        None, ge=16, description="Context length; null uses the model's maximum, or less if memory does not hold it."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the worker; null uses one per core, or a single one for small models."
    )
    pack: bool = Field(True, description="On a CPU, repack the weights of linear layers for faster small matrix products.")
    trace: bool = Field(True, description="On a CPU, trace the forward so that it runs without Python.")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="On a GPU, compile the layers with torch.compile; auto compiles where it is supported."
    )
    invariant: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute each row with the same bits in every step, so that drafts change no answer in any dtype;"
        " auto does so where it costs at most 5 % of a step, and on refuses to start where it cannot hold.",
    )
    tool_format: ToolFormat = Field(
        "auto", description="Format of the model's tool calls; auto detects it from the chat template."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty: auto uses those of the model's "
        "generation_config.json, none the API's.",
    )
    trust_remote_code: bool = Field(False, description="Run code from the model's folder; enable only for trusted models.")

    @property
    def served_name(self) -> str:
        file = self.path.rstrip("/").rsplit("/", 1)[-1]
        return self.name or {str(models.TARGET): models.NAME}.get(self.path) or {smollm2.FILE: smollm2.NAME}.get(file, file)


class DraftModel(Section):
    """The draft model: a smaller model with the target's tokenizer, or a head that reads the target's hidden states."""

    path: ModelPath | None = Field(
        None,
        description="As model.path, for a draft model, or the folder or Hugging Face id of a draft head; mtp is the "
        "multi-token prediction layer in the target's own checkpoint, self is the target without some layers, and null "
        "drafts without a model.",
    )
    skip_layers: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        "auto",
        description="With path self, the layers that drafts skip, counted from 0; auto measures which, once for each model "
        "and machine (speculation.cost_folder).",
    )
    revision: str = Field(
        DEFAULT_REVISION, min_length=1, description="Branch, tag or commit of a Hugging Face id; a commit pins the model."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type; auto uses the checkpoint's. A head has the target's, and is on its device."
    )
    quantize: Quantize = Field("none", description="As model.quantize, for the draft model; a head is not quantised.")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N, for example a second GPU."
    )
    threads: int = Field(1, ge=1, description="CPU threads of the draft model.")
    trust_remote_code: bool = Field(False, description="Run code from the model's folder; enable only for trusted models.")


class Speculation(Section):
    """Speculative decoding: the drafter and its node budget."""

    drafter: DrafterName = Field(
        "fusion", description="Default drafter. The draft, draft-tree, draft-graph and pearl drafters need a draft model."
    )
    max_nodes: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_NODES)] = Field(
        "auto", description="Maximum draft nodes per step; auto measures how many pay off, 0 is plain decoding."
    )
    rule: Literal["keyed", "rejection", "auto"] = Field(
        "keyed",
        description="Default acceptance rule of requests that sample; auto uses rejection where it is faster and a request has "
        "no seed, grammar or further choice.",
    )
    cost_folder: Path | None = Field(
        Path("~/.cache/outrider"), description="Folder of measured step costs; null measures them at every start."
    )
    trace: bool | None = Field(
        None,
        description="Let requests see the drafts of their steps, which may contain text of the datastores and the base table; "
        "null allows it on a server without API keys.",
    )
    trigram: TrigramOptions = TrigramOptions()
    retrieval: RetrievalOptions = RetrievalOptions()
    lookup: LookupOptions = LookupOptions()
    lookahead: LookaheadOptions = LookaheadOptions()
    prediction: PredictionOptions = PredictionOptions()
    fusion: FusionOptions = FusionOptions()
    draft: DraftOptions = DraftOptions()
    draft_tree: DraftTreeOptions = DraftTreeOptions()
    draft_graph: DraftGraphOptions = DraftGraphOptions()
    pearl: PearlOptions = PearlOptions()

    @model_validator(mode="before")
    @classmethod
    def _decode_nested_lists(cls, given: Any) -> Any:
        """Decodes lists of nested sections, which pydantic-settings passes on as JSON text."""
        if isinstance(given, dict):
            for section in given.values():
                for name, value in section.items() if isinstance(section, dict) else ():
                    if isinstance(value, str) and value.startswith("["):
                        section[name] = parse_list(name, value)
        return given

    @property
    def options(self) -> Options:
        """The options of all drafters."""
        return Options(
            trigram=self.trigram,
            retrieval=self.retrieval,
            lookup=self.lookup,
            lookahead=self.lookahead,
            prediction=self.prediction,
            fusion=self.fusion,
            draft=self.draft,
            draft_tree=self.draft_tree,
            draft_graph=self.draft_graph,
            pearl=self.pearl,
        )


class Sessions(Section):
    """State kept between the requests of a session."""

    capacity: int = Field(32, ge=0, description="Maximum sessions; the least recently used idle one is evicted first.")
    kv_bytes: int | None = Field(
        None,
        ge=0,
        description="Maximum bytes of the sessions' keys and values, of which shared prefixes count once; null is a quarter of "
        "the machine's memory.",
    )
    automatic: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Find sessions by the text of the prompt, also for requests that name none; auto does so unless the "
        "address is public and there are no API keys.",
    )
    learn: Literal["session", "key"] = Field(
        "session",
        description="What drafts learn from: the session, or also earlier sessions of the API key, on any server that finds "
        "sessions by text.",
    )
    learned_tokens: int = Field(1 << 15, ge=1, le=1 << 20, description="Tokens of earlier sessions kept in memory per API key.")
    ttl_seconds: float = Field(1800.0, gt=0, description="Idle time after which a session is evicted.")
    folder: Path | None = Field(
        None,
        description="Folder in which sessions outlive a restart; each file is readable by the owner only. null saves nothing.",
    )
    folder_bytes: int = Field(16 << 30, ge=0, description="Maximum bytes of that folder per model; the oldest files go first.")
    slots: int | None = Field(
        None,
        ge=1,
        description="KV caches on the device; other sessions are swapped to host memory. null fits as many as possible. On a"
        " GPU, this many full contexts are shared by all sessions, in pages.",
    )


class Scheduling(Section):
    """The queue in front of the worker."""

    max_active: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Requests served concurrently; null allows up to 8: as many as pay on this machine and have KV caches.",
    )
    max_gap_ms: float | None = Field(
        None,
        gt=0,
        description="Maximum time between tokens while another prompt is read; null allows 1.8 times the usual time.",
    )
    max_waiting: int = Field(64, ge=0, description="Maximum queued requests; further ones get a 429.")
    max_waiting_tokens: int = Field(1 << 20, ge=1, description="Maximum prompt tokens of all queued requests.")
    queue_seconds: float | None = Field(None, gt=0, description="Maximum time in the queue before a 503; null sets no limit.")
    request_seconds: float | None = Field(
        None, gt=0, description="Maximum time per request before an error; null sets no limit."
    )
    stall_seconds: float = Field(120.0, gt=0, description="A busy worker that is silent for this long is restarted.")
    load_seconds: float | None = Field(
        1800.0, gt=0, description="Time for a worker to download and load its model before it is ended; null sets no limit."
    )

    @property
    def most_active(self) -> int:
        """The most requests that a worker serves concurrently; it may serve fewer if max_active is not set."""
        return self.max_active or DEFAULT_MAX_ACTIVE


class Responses(Section):
    """Responses stored in memory for /v1/responses."""

    capacity: int = Field(1000, ge=1, description="Maximum stored responses per key; the key's oldest is evicted first.")
    key_bytes: int = Field(64 << 20, ge=0, description="Maximum size of a key's stored responses, as JSON.")
    total_bytes: int = Field(
        256 << 20, ge=0, description="Maximum size of all stored responses; each key may use an equal share, up to key_bytes."
    )
    ttl_seconds: float = Field(3600.0, gt=0, description="Time after which a stored response expires.")


class Logging(Section):
    """Logs on stderr."""

    format: Literal["human", "json"] = Field("human", description="Log format.")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum level.")
    requests: bool = Field(True, description="Log one line per request, without its text.")
    prompts: bool = Field(False, description="Also log request bodies, which contain the prompts.")


class Tracing(Section):
    """OpenTelemetry traces; requires the `otel` extra."""

    endpoint: str | None = Field(None, description="OTLP/HTTP collector, such as http://localhost:4318; null disables tracing.")


class Limits(Section):
    """Upper bounds on one request."""

    body_bytes: int = Field(8 << 20, ge=1024, description="Maximum size of the request body.")
    max_tokens: int | None = Field(None, ge=1, description="Maximum tokens of an answer; null allows the rest of the context.")
    choices: int = Field(16, ge=1, le=128, description="Maximum choices (n or best_of).")
    stop_strings: int = Field(16, ge=1, le=1 << 10, description="Maximum number of stop strings.")
    stop_characters: int = Field(500, ge=1, description="Maximum length of a stop string.")
    stop_token_ids: int = Field(128, ge=0, le=1 << 10, description="Maximum number of stop tokens.")
    messages: int = Field(2048, ge=1, le=1 << 14, description="Maximum messages of a chat.")
    prompts: int = Field(64, ge=1, le=1 << 14, description="Maximum prompts of a completion.")
    logit_biases: int = Field(1024, ge=0, le=1 << 14, description="Maximum entries of logit_bias.")
    logprobs: int = Field(
        1 << 20, ge=1, description="Maximum log-probabilities of an answer: prompts x choices x tokens x (1 + logprobs)."
    )
    grammar_bytes: int = Field(1 << 16, ge=1, description="Maximum size of a JSON schema, regex or grammar.")
    schema_depth: int = Field(64, ge=1, description="Maximum nesting depth of a JSON schema.")
    rule_depth: int = Field(256, ge=1, description="Maximum depth of the references between the rules of a grammar.")
    template_arguments: tuple[str, ...] = Field(
        ("enable_thinking", "thinking", "reasoning_effort"), description="Allowed fields of chat_template_kwargs."
    )


class Settings(BaseSettings):
    """The root of the tree."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_", env_nested_delimiter="__", frozen=True, extra="forbid", nested_model_default_partial_update=True
    )

    server: Server = Server()
    auth: Auth = Auth()
    model: Model = Model()
    draft_model: DraftModel = DraftModel()
    speculation: Speculation = Speculation()
    sessions: Sessions = Sessions()
    scheduling: Scheduling = Scheduling()
    responses: Responses = Responses()
    limits: Limits = Limits()
    logging: Logging = Logging()
    metrics: MetricsAccess = MetricsAccess()
    tracing: Tracing = Tracing()

    @property
    def shows_drafts(self) -> bool:
        """Whether requests may see the drafts of their steps."""
        return not self.auth.keys if self.speculation.trace is None else self.speculation.trace

    @property
    def learns_from_sessions(self) -> bool:
        """Whether the drafts of a session learn from earlier ones of its principal."""
        return self.sessions.learn == "key" and self.finds_sessions_by_text

    @property
    def finds_sessions_by_text(self) -> bool:
        """Whether sessions are found by the text of a prompt. Without keys all clients are one principal."""
        private = bool(self.auth.keys) or is_loopback(self.server.host)
        return self.sessions.automatic == "on" or (self.sessions.automatic == "auto" and private)


def parse_list(name: str, value: str) -> Any:
    """Decodes a JSON list. Raises SettingsError."""
    try:
        return json.loads(value)
    except ValueError:
        raise SettingsError(f'{name} takes a JSON list such as \'["a", "b"]\', not {value}.') from None
