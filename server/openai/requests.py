"""Builds the engine's requests from a validated body; checks the bounds that the settings and the model impose."""

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
from fastapi import Request as HTTPRequest

from outrider.drafters.options import NEED_A_MODEL
from outrider.server.chat.prompt import PromptEncoder
from outrider.server.engine.messages import PictureInput, Ready, Request
from outrider.server.fair_threads import ANYONE
from outrider.server.http.errors import APIError, ContextExceeded
from outrider.server.http.json_route import turn_of
from outrider.server.openai.conversation import beginning, content_text
from outrider.server.openai.fields import NO_DEFAULTS, SamplingFields, SpeculationBody
from outrider.server.openai.models import ModelNames
from outrider.server.openai.schema import ChatBody, GenerationBody
from outrider.server.settings import Settings
from outrider.verify.sampling_params import ReasoningLimit, SamplingParams

B = TypeVar("B", bound=GenerationBody)
SESSION_CHARACTERS = 256
MAX_STOP_STRINGS = 16
MAX_CHOICES = 16  # n or best_of
# Of an answer: prompts x choices x tokens x (1 + logprobs).
MAX_LOGPROBS = 1 << 20
MAX_STOP_CHARACTERS = 500
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
# Prompts that are not chats share a replica of a cluster if their first tokens are the same; this is their number.
AFFINITY_TOKENS = 64
# The stride is odd, so that the choices' seeds differ.
SEED_STRIDE = 0x9E3779B97F4A7C15


def no_corpus(principal: str, name: str | None) -> None:
    """`Corpora.block` of a server that keeps no corpora."""
    if name is not None:
        message = f"This server keeps no corpora; leave 'speculation.corpus' out instead of naming {name!r}."
        raise APIError(400, message, "speculation.corpus", "no_corpora")


class RequestBuilder:
    """Checks bodies and builds the engine's requests."""

    def __init__(
        self,
        settings: Settings,
        prompts: PromptEncoder,
        wait_started: Callable[[], Awaitable[Ready]],
        charge: Callable[[str, int], None] = lambda principal, requests: None,
        sampling_defaults: SamplingFields = NO_DEFAULTS,
        corpus_block: Callable[[str, str | None], str | None] = no_corpus,
    ) -> None:
        """`wait_started` returns the properties of the worker once it has loaded, and may raise EngineError.

        `charge` counts further requests of a principal: every choice of every prompt counts as one. `sampling_defaults` are
        the model's, for all endpoints. `corpus_block` is `Corpora.block`.
        """
        self._names = ModelNames(settings.model)
        self._finds_sessions = settings.finds_sessions_by_text
        self._has_draft_model = settings.draft_model.path is not None
        self._traces, self._coalesces = settings.shows_drafts, settings.server.coalesce_ms > 0
        self._limits = settings.limits
        self._prompts = prompts
        self.ready = wait_started
        self._charge = charge
        self._sampling_defaults = sampling_defaults
        self._corpus_block = corpus_block

    def named(self, body: B) -> B:
        """The body; one that names no model gets the served one's name."""
        return body if body.model else body.model_copy(update={"model": self._names.served_name})

    def check(self, body: GenerationBody) -> None:
        """Checks the fields that all endpoints share. Raises APIError."""
        self._names.check(body.model)
        self._names.adapter(body.model, body.lora)
        drafter = body.speculation and body.speculation.drafter
        if drafter in NEED_A_MODEL and not self._has_draft_model:
            message = f"The drafter {drafter!r} needs a draft model, and this server has none; choose another drafter."
            raise APIError(400, message, "speculation", "no_draft_model")
        if body.traces_steps:
            self._check_trace(body)
        for name in ("n", "best_of"):
            check_count(name, getattr(body, name, None) or 1, MAX_CHOICES, "choices")
        check_count("stop", len(body.stop_strings), MAX_STOP_STRINGS, "stop strings")
        if any(len(stop) > MAX_STOP_CHARACTERS for stop in body.stop_strings):
            message = f"A stop string may have at most {MAX_STOP_CHARACTERS} characters."
            raise APIError(400, message, "stop", "too_long")
        check_count("logit_bias", len(body.logit_bias or {}), MAX_LOGIT_BIASES, "biases")
        self._check_tokens("logit_bias", [int(token) for token in body.logit_bias or {}])
        check_count("stop_token_ids", len(body.stop_token_ids or []), MAX_STOP_TOKEN_IDS, "stop tokens")
        self._check_tokens("stop_token_ids", body.stop_token_ids or [])

    async def build(
        self,
        http: HTTPRequest,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        grammar: str | None = None,
        reasoning: ReasoningLimit | None = None,
        shown_tokens: Sequence[int] = (),
        pictures: Sequence[PictureInput] = (),
        open_ended: bool = False,
    ) -> list[Request]:
        """One request per choice of each prompt (token ids), which has these pictures. Raises APIError.

        `grammar` is checked; with `open_ended`, the answer ends where the grammar may end and the model leaves it.
        `shown_tokens` are special tokens that the text has even if the body asks for none.
        """
        context_tokens = (await self.ready()).context_tokens
        for prompt in prompts:
            check_prompt(prompt, context_tokens, "messages" if isinstance(body, ChatBody) else "prompt")
        request_id, principal, choices = uuid.uuid4().hex, http.state.principal, body.candidates
        session, shared = self._session_name(http, body), await self._shared(http, body, context_tokens)
        max_tokens = self._max_tokens(body, prompts, context_tokens)
        self._charge(principal, len(prompts) * choices - 1)
        rule = (body.speculation and body.speculation.rule) or "keyed"
        requests: list[Request] = []
        for prompt in prompts:
            own = msgspec.structs.replace(
                shared,
                prompt=prompt,
                max_tokens=min(max_tokens, context_tokens - len(prompt)),
                # Choices without a session share a temporary one, so that the prompt is read once.
                session=session or (f"choices-{request_id}" if choices > 1 else None),
                temporary=session is None and choices > 1,
                stop_token_ids=[*(body.stop_token_ids or ()), *self._prompts.fill_in_stops(prompt)],
                shown_tokens=list(shown_tokens),
                grammar=grammar,
                open_ended=open_ended,
                reasoning=reasoning,
                pictures=list(pictures),
                affinity=affinity_of(principal, session, body, prompt),
            )
            params = body.sampling_params(self._sampling_defaults)  # without a seed, each prompt gets its own
            for choice in range(choices):
                scores_prompt, id = body.returns_prompt_logprobs and choice == 0, f"{request_id}-{len(requests)}"
                seeded = replace(params, rule=rule, seed=(params.seed + choice * SEED_STRIDE) % (1 << 64))
                requests.append(msgspec.structs.replace(own, id=id, params=seeded, wants_prompt_logprobs=scores_prompt))
        return requests

    async def _shared(self, http: HTTPRequest, body: GenerationBody, context_tokens: int) -> Request:
        """What the requests of a body have in common, as far as the body says it. Raises APIError."""
        speculation, principal, prediction = body.speculation or SpeculationBody(), http.state.principal, list[int]()
        if body.prediction is not None:
            prediction = await self._prompts.plain(principal, content_text(body.prediction.content), context_tokens)
        return Request(
            id="",
            prompt=[],
            params=SamplingParams(),
            max_tokens=0,
            stop=body.stop_strings,
            principal=principal,
            drafter=speculation.drafter,
            max_nodes=speculation.max_nodes,
            corpus=self._corpus_block(turn_of(http), body.corpus),
            prediction=prediction[:context_tokens],
            skip_special_tokens=body.hides_special_tokens,
            continues_prompt=body.continues_prompt,
            priority=body.priority or 0,
            keep_stop=bool(body.include_stop_str_in_output),
            trace=body.traces_steps,
            adapter=self._names.adapter(body.model, body.lora),
        )

    def _max_tokens(self, body: GenerationBody, prompts: Sequence[Sequence[int]], context_tokens: int) -> int:
        """The longest answer that the body, the settings and the context allow. Raises APIError."""
        scored_tokens = check_logprobs(body, prompts, context_tokens, MAX_LOGPROBS)
        limits = (context_tokens, body.token_limit, self._limits.max_tokens, scored_tokens)
        return min(limit for limit in limits if limit is not None)

    def _session_name(self, http: HTTPRequest, body: GenerationBody) -> str | None:
        """The name of the request's session among its principal's; None if the request names none.

        Several conversations may have one cache key, and would overwrite each other in one session. Where sessions are found by
        text, each conversation has its own, so the key is not needed.

        Clients choose session ids, so an id can be guessed, and hits in its cache show what was asked. Clients without keys are
        one principal; their addresses tell them apart.
        """
        hint = None if self._finds_sessions else body.prompt_cache_key
        name = body.session_id or http.headers.get("x-session-id") or hint
        if not name:
            return None
        name = name[:SESSION_CHARACTERS]
        if http.state.principal == ANYONE and http.client is not None:
            return f"{http.client.host} {name}"
        return name

    def _check_trace(self, body: GenerationBody) -> None:
        """Raises APIError if the drafts of the steps cannot be shown."""
        message = None
        if self._coalesces:
            message = "'speculation.trace' would show the draft acceptance that server.coalesce_ms hides; leave it out."
        elif not self._traces:
            message = "This server shows no drafts; leave 'speculation.trace' out, or set its setting of that name to true."
        elif not body.stream:
            message = "'speculation.trace' needs a stream; set 'stream' to true, or leave it out."
        if message is not None:
            raise APIError(400, message, "speculation.trace", "invalid_value")

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        invalid = next((token for token in tokens if token >= self._prompts.size), None)
        if invalid is not None:
            message = f"Invalid '{name}': token ids must be from 0 to {self._prompts.size - 1}, not {invalid}."
            raise APIError(400, message, name, "invalid_value")


def affinity_of(principal: str, session: str | None, body: GenerationBody, prompt: Sequence[int]) -> str:
    """A digest that the requests of one conversation have in common.

    That is their session, or else how the conversation begins. Principals do not share it.
    """
    if session is not None:
        common = f"session\0{session}"
    elif isinstance(body, ChatBody):
        common = f"chat\0{beginning(body.messages)}"
    else:
        common = f"text\0{prompt[:AFFINITY_TOKENS]}"
    return hashlib.blake2b(f"{principal}\0{common}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def check_count(name: str, count: int, limit: int, unit: str) -> None:
    """Raises APIError if the field `name` has more than `limit` elements."""
    if count > limit:
        raise APIError(400, f"Invalid '{name}': at most {limit} {unit} are allowed, not {count}.", name, "too_many")


def check_logprobs(body: GenerationBody, prompts: Sequence[Sequence[int]], context_tokens: int, limit: int) -> int:
    """The longest answer, in tokens, whose log-probabilities are within `limit`. Raises APIError if the body asks for more."""
    if body.num_logprobs is None:
        return context_tokens
    per_position = body.candidates * (1 + body.num_logprobs)
    echoed = sum(map(len, prompts)) if body.returns_prompt_logprobs else 0
    affordable = (limit // per_position - echoed) // len(prompts)
    required = 1 if body.token_limit is None else min(body.token_limit, context_tokens - min(map(len, prompts)))
    if affordable < required:
        message = (
            f"The answer could have more than {limit} log-probabilities (prompts x choices x tokens x (1 + logprobs)); "
            "lower 'logprobs', 'n', 'max_tokens' or the number of prompts."
        )
        raise APIError(400, message, "logprobs", "too_many")
    return affordable


def check_prompt(prompt: Sequence[int], context_tokens: int, field: str = "prompt") -> None:
    """Raises APIError if the prompt is empty or does not leave room for an answer."""
    if not prompt:
        raise APIError(400, "The prompt is empty; give at least one token.", field, "invalid_value")
    if len(prompt) >= context_tokens:
        raise ContextExceeded(len(prompt), context_tokens, field)
