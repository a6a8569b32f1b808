"""Every setting, in one frozen tree, validated once.

A setting has one name in YAML (`speculation.drafter`), in the environment (`OUTRIDER_SPECULATION__DRAFTER`) and as a
flag (`--speculation.drafter`). Flags win over the environment, the environment over the file, the file over the defaults.
Unknown keys are errors. Nothing else in the project reads the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableError

import models
from drafters.interface import MAX_NODES
from drafters.options import (
    NEED_A_MODEL,
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


class SettingsError(ValueError):
    """A setting is wrong; the message names it and says what it takes."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Server(Section):
    """The HTTP front end."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 = any free port")
    keep_alive_seconds: float = Field(15.0, gt=0, description="between SSE comments while a stream has nothing to say")
    coalesce_ms: int = Field(0, ge=0, le=10_000, description="send streams by a clock of so many ms; 0 = as tokens come")
    drain_seconds: float = Field(30.0, ge=0, description="at the end, for the requests that are being answered")
    cors_origins: tuple[str, ...] = Field((), description="web pages that may ask; none may where it is empty")


class ApiKey(Section):
    """One client's key, and what belongs to it."""

    key: SecretStr = Field(min_length=8)
    datastores: tuple[str, ...] = Field((), description="searched for this key's requests alone, beside the common ones")
    max_concurrent: int | None = Field(None, ge=1, description="instead of the common one, as the next")
    requests_per_minute: int | None = Field(None, ge=1)


def _key_alone(value: Any) -> Any:
    return {"key": value} if isinstance(value, str) else value


class Auth(Section):
    """Who may ask. Without keys, anyone who reaches the address."""

    file: Path | None = Field(None, description="YAML file with more `keys`")
    keys: dict[str, Annotated[ApiKey, BeforeValidator(_key_alone)]] = Field(
        {}, description="by name: a key, or {key, datastores}"
    )
    open: bool = Field(False, description="listen on a public address although there are no keys")
    max_concurrent: int | None = Field(None, ge=1, description="requests of one key at once; null = any number")
    requests_per_minute: int | None = Field(None, ge=1, description="of one key; null = any number")


class Model(Section):
    """The target model."""

    path: str = Field(str(models.TARGET), description="a local folder or a Hugging Face id")
    name: str | None = Field(None, description="the name clients use; default: the last part of the path")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    context_tokens: int | None = Field(None, ge=16, description="default: as many as the model was made for")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the worker; default: one per core, one in all for small models"
    )
    pack: bool = Field(True, description="on a CPU, lay linear layers out as it multiplies fastest")
    trace: bool = Field(True, description="on a CPU, run the model's forward without Python")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="on a GPU, kernels made for the model by torch.compile at the first start; auto = where it can"
    )
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "pythonic"] = Field(
        "auto", description="how the model writes tool calls; auto = as its chat template has them"
    )
    trust_remote_code: bool = False

    @property
    def served_name(self) -> str:
        embedded = self.path == str(models.TARGET)
        return self.name or (models.NAME if embedded else self.path.rstrip("/").rsplit("/", 1)[-1])


class DraftModel(Section):
    """A small model of the target's family, which drafts for it."""

    path: str | None = Field(None, description="a local folder or a Hugging Face id; null = there is none")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="another GPU than the target's, say")
    threads: int = Field(1, ge=1, description="CPU threads of its own")
    trust_remote_code: bool = False


class Speculation(Section):
    """How drafts are made."""

    drafter: DrafterName = "fusion"
    max_nodes: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_NODES)] = "auto"  # draft nodes verified in one step
    cost_folder: Path | None = Field(
        Path("~/.cache/outrider"), description="where what steps cost on this machine is kept; null = measure at every start"
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
    def _lists_from_the_environment(cls, given: Any) -> Any:
        """A list deeper down comes from the environment as JSON text."""
        if isinstance(given, dict):
            for section in given.values():
                for name, value in section.items() if isinstance(section, dict) else ():
                    if isinstance(value, str) and value.startswith("["):
                        section[name] = _list(name, value)
        return given

    @property
    def options(self) -> Options:
        """How each drafter works, as drafters take it."""
        tables = (self.trigram, self.retrieval, self.lookup, self.lookahead, self.prediction, self.fusion)
        return Options(*tables, self.draft, self.draft_tree, self.draft_graph, self.pearl)


class Sessions(Section):
    """What is kept between the requests of one session."""

    capacity: int = Field(8, ge=0, description="sessions kept; the least recently used goes first")
    ttl_seconds: float = Field(1800.0, gt=0)
    slots: int | None = Field(
        None, ge=1, description="whose KV cache is on the device, the others' waiting in host memory; default: as many as fit"
    )


class Scheduling(Section):
    """The queue in front of the worker."""

    max_active: int = Field(4, ge=1, le=64, description="requests that take turns, a step each")
    max_waiting: int = Field(64, ge=0, description="requests that may wait; more get a 429")
    max_waiting_tokens: int = Field(1 << 20, ge=1, description="prompt tokens that may wait")
    queue_seconds: float | None = Field(None, gt=0, description="who has waited so long gets a 503; null = nobody")
    request_seconds: float | None = Field(None, gt=0, description="an answer that takes so long ends with an error")
    stall_seconds: float = Field(120.0, gt=0, description="a worker that is silent for so long while it has work is replaced")


class Responses(Section):
    """Answers of /v1/responses that are kept, in memory."""

    capacity: int = Field(1000, ge=1, description="responses kept; the oldest go first")
    ttl_seconds: float = Field(3600.0, gt=0)


class Logging(Section):
    """What the server says of itself, on stderr."""

    format: Literal["human", "json"] = "human"
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = Field(True, description="a line for each request: what it took, never what it said")
    prompts: bool = Field(False, description="and what it said: only where nobody minds")


class Tracing(Section):
    """OpenTelemetry; needs the extra `otel`."""

    endpoint: str | None = Field(None, description="an OTLP collector's http address, such as http://localhost:4318")


class Limits(Section):
    """Bounds on what one request may ask for."""

    body_bytes: int = Field(8 << 20, ge=1024)
    choices: int = Field(16, ge=1, le=128)
    stop_strings: int = Field(16, ge=1)
    stop_characters: int = Field(500, ge=1)
    messages: int = Field(2048, ge=1)
    prompts: int = Field(64, ge=1, description="of one completions request")
    logit_biases: int = Field(1024, ge=0)
    grammar_bytes: int = Field(1 << 16, ge=1, description="of a schema, regex or grammar")
    schema_depth: int = Field(64, ge=1)
    template_arguments: tuple[str, ...] = Field(
        ("enable_thinking", "thinking", "reasoning_effort"), description="what chat_template_kwargs may hold"
    )


class Settings(BaseSettings):
    """The whole tree."""

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
    tracing: Tracing = Tracing()


def load_settings(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings from `file`, the environment and `flags` (dotted names). Raises SettingsError with one sentence."""
    tree: dict[str, Any] = {}
    for name, value in (flags or {}).items():
        _set(tree, name.split("."), value)

    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            content = InitSettingsSource(settings_cls, _read(file) if file else {})
            return init_settings, env_settings, content

    try:
        loaded = dict(Loaded(**tree))
        if loaded["auth"].file:
            loaded["auth"] = _with_keys(loaded["auth"])
        drafter = loaded["speculation"].drafter
        if drafter in NEED_A_MODEL and loaded["draft_model"].path is None:
            raise SettingsError(f"The drafter {drafter!r} needs a draft model; name one with --draft-model.")
        return Settings.model_construct(**loaded)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None
    except UnreadableError as error:
        raise SettingsError(f"A setting in the environment cannot be read: {' '.join(str(error).split())}.") from None


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """`--a.b value` and `--a.b=value` pairs to {"a.b": "value"}, lists from JSON; raises SettingsError on anything else."""
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--") or "." not in flag:
            raise SettingsError(
                f"{flag!r} is not a flag; `outrider serve --help` lists them, and any setting works as --section.name VALUE."
            )
        if not equals:
            if not rest:
                raise SettingsError(f"{flag} needs a value.")
            value = rest.pop(0)
        found[flag.removeprefix("--")] = _list(flag, value) if value.startswith("[") else value
    return found


def _list(flag: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise SettingsError(f'{flag} takes a JSON list such as \'["a", "b"]\', not {value}.') from None


def _with_keys(auth: Auth) -> Auth:
    """The section with the keys of its file."""
    assert auth.file is not None
    try:
        return Auth.model_validate({**vars(auth), "keys": {**_read(auth.file), **auth.keys}})
    except ValidationError as error:
        name = ".".join(str(part) for part in error.errors()[0]["loc"][1:])
        raise SettingsError(f"The key {name!r} in {auth.file} is wrong: {error.errors()[0]['msg']}.") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise SettingsError(f"The configuration file {file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"The configuration file {file} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"The configuration file {file} must hold sections such as `model:` and `server:`.")
    return content


def _set(tree: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{'.'.join(parts)!r} cannot be set: {part!r} is no section.")
    tree[parts[-1]] = value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"There is no setting {name!r}; configs/default.yaml lists them all."
    given = "" if "keys" in name else f" (got {first['input']!r})"  # a key never appears in a message
    return f"The setting {name!r} is wrong: {first['msg']}{given}."
