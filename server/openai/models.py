"""The served model: /v1/models, and its tokenizer at /tokenize and /detokenize."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from pydantic import model_validator

from outrider.server.chat.prompt import PromptEncoder, TemplateOptions
from outrider.server.chat.tools import with_model_ids
from outrider.server.engine.messages import Ready
from outrider.server.http.errors import APIError, shortened
from outrider.server.openai.conversation import Messages
from outrider.server.openai.fields import Body, SamplingFields, TokenIds
from outrider.server.settings import Model
from outrider.server.settings.models import NAME_CHARACTERS


class ModelNames:
    """The names under which the model and its adapters are served. Aliases may contain the wildcards `*`, `?` and `[...]`."""

    def __init__(self, model: Model) -> None:
        self._model, self._aliases, self._adapters = model, model.aliases, model.adapters
        self.served_name = model.served_name

    @property
    def listed(self) -> list[str]:
        """The served name, the aliases without wildcards, and the adapters."""
        return [self.served_name, *(alias for alias in self._aliases if not set(alias) & set("*?[")), *self._adapters]

    def check(self, name: str) -> None:
        """Raises APIError if the model does not have this name."""
        if not self._model.answers_to(name):
            message = f"The model {name!r} does not exist; this server serves {self.served_name!r}."
            raise APIError(404, message, "model", "model_not_found")

    def adapter(self, model: str | None, lora: str | None = None) -> str | None:
        """The adapter that a request names in one of these fields. Raises APIError."""
        if lora is not None and lora not in self._adapters:
            known = f"has {', '.join(self._adapters)}" if self._adapters else "has none"
            raise APIError(404, f"There is no adapter {shortened(lora, NAME_CHARACTERS)!r}; this server {known}.", "lora")
        return lora or self._model.adapter(model)


class TokenizeBody(Body):
    """POST /tokenize: text, or messages. llama-server names the text `content`, and adds no special tokens unless asked to."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeBody:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give one of 'prompt', 'messages' and 'content'")
        if self.add_special is not None and self.content is None:
            raise ValueError("'add_special' belongs to 'content'")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


@dataclass(frozen=True)
class ModelEndpoint:
    names: ModelNames
    prompts: PromptEncoder
    wait_started: Callable[[], Awaitable[Ready]]
    info: Callable[[], Ready | None]  # the properties of a worker that is or was ready
    sampling_defaults: SamplingFields
    capabilities: Sequence[str]
    created: int = field(default_factory=lambda: int(time.time()))

    def list(self, client_version: str | None) -> dict[str, Any]:
        """GET /v1/models.

        Codex sends its version and expects `models`, an entry of which has dozens of fields that change between its releases.
        For a model that is not listed, it uses its own settings.
        """
        catalog: dict[str, Any] = {} if client_version is None else {"models": []}
        return {"object": "list", "data": [self._card(name) for name in self.names.listed], **catalog}

    def retrieve(self, name: str) -> dict[str, Any]:
        """GET /v1/models/{name}. Raises APIError."""
        self.names.check(name)
        return self._card(name)

    def card(self) -> dict[str, Any]:
        return self._card(self.names.listed[0])

    def _card(self, name: str) -> dict[str, Any]:
        """The model under one of its names. The length of its context is null until it is loaded, and has the names that the
        clients of vLLM, of routers and of llama-server know.
        """
        info = self.info()
        context_tokens = info and info.context_tokens
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "outrider",
            "max_model_len": context_tokens,
            "context_length": context_tokens,
            "meta": {"n_ctx": context_tokens, "n_vocab": self.prompts.size},
            "capabilities": [*self.capabilities, *(["vision"] if info and info.reads_pictures else [])],
            **({} if self.names.adapter(name) is None else {"parent": self.names.served_name}),
            "default_sampling_params": self.sampling_defaults.model_dump(exclude_none=True),
        }

    async def tokenize(self, http: Request, body: TokenizeBody) -> dict[str, Any]:
        """The token ids of a text, or of a rendered conversation. Raises APIError and EngineError."""
        principal, context_tokens = http.state.principal, (await self.wait_started()).context_tokens
        if body.messages is not None:
            messages = with_model_ids([message.rendered() for message in body.messages])
            tokens = await self.prompts.chat(principal, messages, TemplateOptions(), context_tokens)
        elif body.content is not None and not body.add_special:
            tokens = await self.prompts.plain(principal, body.content, context_tokens, "content")
        else:
            tokens = await self.prompts.text(principal, body.content or body.prompt or "", context_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": context_tokens}

    async def detokenize(self, http: Request, body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids. Raises APIError and EngineError."""
        context_tokens = (await self.wait_started()).context_tokens
        return {"prompt": await self.prompts.decode(http.state.principal, body.tokens, context_tokens)}
