"""Every setting with its type, default, bounds and description, in one frozen tree. `sources` says where values come from."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.drafters.options import MAX_NODES, DrafterName, Options, PearlOptions, RetrievalOptions, TrigramOptions
from outrider.server.settings.access import Auth, MetricsAccess, Server
from outrider.server.settings.models import DraftModel, Model, Models, expand_list
from outrider.server.settings.section import Section

DEFAULT_MAX_ACTIVE = 8
# All stored responses of /v1/responses take at most this much memory.
RESPONSES_BYTES = 256 << 20


class Trigram(Section):
    """The n-grams of the `trigram` and `fusion` drafters."""

    table: str | None = Field(None, description="Base table file; null uses the embedded one if the model has its tokenizer.")


class Retrieval(Section):
    """The texts that the `retrieval` and `fusion` drafters search."""

    datastores: tuple[str, ...] = Field(
        (), description="Folders made by `outrider datastore build --kind suffix` or `outrider datastore watch`."
    )


class Pearl(Section):
    """The `pearl` drafter."""

    only_if_worth: bool = Field(
        True,
        description="Also draft as `lookup` does, and use the draft model only if that pays; false runs the paper's algorithm.",
    )


class Speculation(Section):
    """Speculative decoding: the drafter and its node budget."""

    drafter: DrafterName = Field(
        "fusion", description="Default drafter; draft, draft-tree, draft-graph and pearl need a draft model."
    )
    max_nodes: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_NODES)] = Field(
        "auto", description="Maximum draft nodes per step; auto chooses by measured costs, 0 is plain decoding."
    )
    cost_folder: Path | None = Field(
        Path("~/.cache/outrider"),
        description="Folder of measured step costs, kernels and tried chat templates; null finds them at every start.",
    )
    trace: bool | None = Field(
        None, description="Let requests see the drafts of their steps; null allows it if there are no API keys."
    )
    trigram: Trigram = Trigram()
    retrieval: Retrieval = Retrieval()
    pearl: Pearl = Pearl()

    @property
    def options(self) -> Options:
        return Options(
            trigram=TrigramOptions(table=self.trigram.table),
            retrieval=RetrievalOptions(datastores=self.retrieval.datastores),
            pearl=PearlOptions(only_if_worth=self.pearl.only_if_worth),
        )


class Sessions(Section):
    """State kept between the requests of a session."""

    capacity: int = Field(32, ge=0, description="Maximum sessions; the least recently used idle one is evicted first.")
    kv_bytes: int | None = Field(
        None,
        ge=0,
        description="Maximum bytes of the sessions' keys and values, where shared prefixes count once; null allows a quarter "
        "of the free memory.",
    )
    automatic: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Find sessions by the prompt's text; auto does unless the address is public and there are no API keys.",
    )
    learn: Literal["session", "key"] = Field(
        "session",
        description="Drafts learn from their session, or with key also from earlier sessions of the same API key that are "
        "found by text.",
    )
    ttl_seconds: float = Field(1800.0, gt=0, description="Idle time after which a session is evicted.")
    folder: Path | None = Field(
        None, description="Folder where sessions are saved, so that they outlive a restart; null saves nothing."
    )
    folder_bytes: int = Field(
        16 << 30, ge=0, description="Maximum bytes of sessions.folder per model; the oldest files are removed first."
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Number of KV caches on the device; other sessions are swapped out to host memory. With null, their "
        "number follows from the free memory.",
    )


class Corpora(Section):
    """Texts that clients post for the drafts of their requests."""

    total_bytes: int = Field(
        64 << 20, ge=0, description="Maximum size of all corpora, as indexed; each key may use an equal share. 0 keeps none."
    )


class Scheduling(Section):
    """The queue in front of the worker."""

    max_active: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Maximum requests that answer concurrently; with null, the number that decodes fastest, at most 8 "
        "and at most the number of KV caches.",
    )
    max_waiting: int = Field(64, ge=0, description="Maximum queued requests, above which keys have equal shares.")
    queue_seconds: float | None = Field(None, gt=0, description="Maximum time in the queue before a 503; null sets no limit.")
    request_seconds: float | None = Field(
        None, gt=0, description="Maximum time per request before an error; null sets no limit."
    )
    overlap: bool = Field(
        True, description="On a GPU, compute one half of the answers while the host works for the other, if that pays."
    )
    stall_seconds: float = Field(
        120.0, gt=0, description="Time after which a busy worker that reports no progress is restarted."
    )

    @property
    def most_active(self) -> int:
        """The most requests that a worker serves concurrently; it may serve fewer if max_active is not set."""
        return self.max_active or DEFAULT_MAX_ACTIVE


class Logging(Section):
    """Logs on stderr."""

    format: Literal["human", "json"] = Field("human", description="Log format.")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum level.")
    prompts: bool = Field(False, description="Also log request bodies, which contain the prompts.")


class Tracing(Section):
    """OpenTelemetry traces; requires the `otel` extra."""

    endpoint: str | None = Field(None, description="OTLP/HTTP collector, such as http://localhost:4318; null disables tracing.")


class Limits(Section):
    """Upper bounds on one request."""

    body_bytes: int = Field(8 << 20, ge=1024, description="Maximum size of a request's body.")
    max_tokens: int | None = Field(None, ge=1, description="Maximum tokens of an answer; null allows the rest of the context.")
    fetch_pictures: bool = Field(False, description="Fetch pictures from the public addresses that requests name.")
    template_arguments: tuple[str, ...] = Field(
        ("enable_thinking", "thinking", "reasoning_effort"), description="Allowed fields of chat_template_kwargs."
    )


class Settings(BaseSettings):
    """The root of the tree."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_",
        env_nested_delimiter="__",
        env_parse_none_str="null",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    server: Server = Server()
    auth: Auth = Auth()
    model: Model = Model()
    models: Annotated[Models, BeforeValidator(expand_list)] = Models()
    draft_model: DraftModel = DraftModel()
    speculation: Speculation = Speculation()
    sessions: Sessions = Sessions()
    scheduling: Scheduling = Scheduling()
    corpora: Corpora = Corpora()
    limits: Limits = Limits()
    logging: Logging = Logging()
    metrics: MetricsAccess = MetricsAccess()
    tracing: Tracing = Tracing()

    @property
    def shows_drafts(self) -> bool:
        """Whether requests may see the drafts of their steps."""
        return not self.auth.keys if self.speculation.trace is None else self.speculation.trace

    @property
    def needs_torch(self) -> bool:
        """Whether the worker imports PyTorch. It does not if llama.cpp is named as the backend and computes everything."""
        is_alone = self.draft_model.path is None and not self.model.trust_remote_code
        return self.model.backend != "llama.cpp" or not is_alone

    @property
    def learns_from_sessions(self) -> bool:
        """Whether the drafts of a session learn from earlier ones of its principal."""
        return self.sessions.learn == "key" and self.finds_sessions_by_text

    @property
    def finds_sessions_by_text(self) -> bool:
        """Whether sessions are found by the text of a prompt. Without keys all clients are one principal."""
        private = bool(self.auth.keys) or self.server.is_local
        return self.sessions.automatic == "on" or (self.sessions.automatic == "auto" and private)


def encode_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain data, with the API keys masked."""
    return settings.model_dump(mode="json")


def decode_settings(plain: dict[str, Any]) -> Settings:
    """The settings that `encode_settings` wrote. Reads neither files nor the environment."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return Settings.model_construct(**{name: section.model_validate(plain[name]) for name, section in sections.items()})  # type: ignore[union-attr]
