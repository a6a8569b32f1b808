"""Encodes messages or text as token ids.

Promises that the text of a message, tool or template argument never becomes a special token, whatever it contains.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.server.batches import batches
from outrider.server.chat.fill_in import MARKER_COUNT, FillInText, FillInTokens, assemble, encode_parts, find_tokens, fit
from outrider.server.chat.plain_text import Marks, PlainText, count_marks, encode
from outrider.server.chat.template import TEMPLATE_ERRORS, ChatTemplate, ChatTemplates
from outrider.server.chat.tools import FORMATS, ToolFormat
from outrider.server.fair_threads import ANYONE, FairThreads
from outrider.server.http.errors import APIError, ContextExceeded
from outrider.server.imports import frozen
from outrider.server.pictures.service import NO_PICTURES, RequestPictures
from outrider.verify.errors import loading
from outrider.verify.fast_tokenizer import FastTokenizer
from outrider.verify.tokenizer import stop_ids

if TYPE_CHECKING:
    from outrider.verify.fast_tokenizer import AnyTokenizer

T = TypeVar("T")
Load = Callable[[], "AnyTokenizer"]
# A text of this length is encoded in about a millisecond, so a thread is not worth it.
INLINE_CHARACTERS = 4096
# Documents of this length together are encoded in one turn, in about a tenth of a second.
BATCH_CHARACTERS = 1 << 18
# The tokens of a text that is too long to be encoded are estimated from its beginning.
SAMPLE_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class TemplateOptions:
    """A request's options of the chat template."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # variables of the template
    add_generation_prompt: bool = True  # end with the opening of the assistant's turn
    continue_final_message: bool = False  # leave the last message open
    tools: Sequence[dict[str, Any]] = ()
    format: ToolFormat = FORMATS["hermes"]  # of calls that the template does not render


def with_pictures(text: str, pictures: RequestPictures) -> str:
    """A rendered conversation with its pictures' text in the place of the template's placeholders. Raises APIError."""
    if not pictures.prepared:
        return text
    between = text.split(pictures.placeholder)
    if len(between) - 1 != len(pictures.prepared):
        message = f"The chat template has {len(between) - 1} places for {len(pictures.prepared)} pictures; leave some out."
        raise APIError(400, message, "messages", "template_error")
    return "".join(part + picture.text for part, picture in zip(between, pictures.prepared, strict=False)) + between[-1]


class PromptEncoder:
    """The model's tokenizer and chat template. Long texts are encoded in the principal's turn."""

    def __init__(self, tokenizer: AnyTokenizer, load: Load | None = None) -> None:
        """`load` returns an equal tokenizer; default: a copy."""
        self._tokenizer = tokenizer
        # Encoding changes a tokenizer's state, so each thread has its own. The second one is loaded when it is first needed.
        self._loaded: Load = lambda: tokenizer
        self._pool = FairThreads[Load]([self._loaded, cache(load or partial(copy.deepcopy, tokenizer))], "outrider-tokenizer")
        added = (str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        self._special = {*tokenizer.all_special_tokens, *added}
        self._preparation: asyncio.Future[None] | None = None
        self.templates = ChatTemplates(tokenizer)
        vocabulary = tokenizer.get_vocab()
        if isinstance(tokenizer, FastTokenizer):
            self._longest_token = tokenizer.longest_token
        else:
            self._longest_token = max((len(token) for token in vocabulary), default=1)
        self._fill_in_tokens = find_tokens(vocabulary)

    async def prepare(self) -> None:
        """Builds what encodes texts, in a thread, because a large vocabulary takes seconds; texts wait for it.

        Raises ModelError.
        """
        if self._preparation is None:
            self._preparation = asyncio.ensure_future(self._pool.run(ANYONE, lambda tokenizer: self._prepare(tokenizer())))
        await asyncio.shield(self._preparation)

    def _prepare(self, tokenizer: AnyTokenizer) -> None:
        with frozen(), loading("The model's tokenizer"):
            self._plain = PlainText(tokenizer)
            self._marks = Marks(self._special, partial(self._plain.encode, tokenizer))

    def template(self, has_tools: bool) -> ChatTemplate:
        """The chat template of requests with tools, or without them. Raises APIError."""
        if not self.templates:
            raise APIError(400, "This model has no chat template; use /v1/completions.", "messages", "no_chat_template")
        return self.templates.choose(has_tools)

    @cached_property
    def rare_ids(self) -> list[int]:
        """The ids of an eighth of the tokens, which texts seldom have: vocabularies begin with the most frequent ones."""
        special = {id for text in self._special if (id := self.token(text)) is not None}
        ids = sorted({*self._tokenizer.get_vocab().values()} - special)
        return ids[-len(ids) // 8 :]

    @property
    def size(self) -> int:
        """The vocabulary's size: token ids are smaller."""
        return len(self._tokenizer)

    def token(self, text: str) -> int | None:
        """The id of the token with exactly this text; None if there is none."""
        found = self._tokenizer.get_vocab().get(text)
        return None if found is None else int(found)

    def ends_with(self, prompt: list[int], text: str) -> bool:
        """Whether the prompt's text ends with `text`, ignoring trailing whitespace."""
        return str(self._tokenizer.decode(prompt[-16:])).rstrip().endswith(text)

    async def chat(
        self,
        principal: str,
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions,
        context_tokens: int,
        pictures: RequestPictures = NO_PICTURES,
    ) -> list[int]:
        """The ids of a conversation, rendered by the chat template. `pictures` are those in it, in order. Raises APIError."""
        template = self.template(bool(options.tools))
        work = partial(self._chat, template, messages, options, context_tokens, pictures)
        await self.prepare()
        return await self._pool.run(principal, lambda tokenizer: work(tokenizer()))  # a template is a program, and may loop

    async def text(self, principal: str, prompt: str | list[int], context_tokens: int) -> list[int]:
        """The ids of a text, including the special tokens in it and around it; ids are only validated. Raises APIError."""
        if isinstance(prompt, str):
            return await self._run(principal, len(prompt), partial(self._encode, "prompt", context_tokens, text=prompt))
        if prompt and not (min(prompt) >= 0 and max(prompt) < self.size):
            raise APIError(400, f"Invalid 'prompt': token ids must be from 0 to {self.size - 1}.", "prompt", "invalid_value")
        return prompt

    async def plain(self, principal: str, text: str, context_tokens: int, field: str = "prediction") -> list[int]:
        """The ids of a text without special tokens: none are added, and none are found in it. Raises APIError."""
        return await self._run(principal, len(text), partial(self._encode_plain, field, context_tokens, text=text))

    async def documents(self, principal: str, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text without special tokens, uint32 [N]; its principal's prompts have their turns meanwhile."""
        await self.prepare()
        found = []
        for batch in batches(texts, len, BATCH_CHARACTERS):
            found += await self._pool.run(principal, partial(self._encode_all, batch))
        return found

    def _encode_all(self, texts: Sequence[str], tokenizer: Load) -> list[NDArray[np.uint32]]:
        return [np.array(self._plain.encode(tokenizer(), text), np.uint32) for text in texts]

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer, as far as the tokenizer knows them; the model may have others."""
        return stop_ids(frozenset(), self._tokenizer)

    @property
    def fills_in(self) -> bool:
        """Whether the model's tokenizer has the tokens of fill-in-the-middle prompts."""
        return self._fill_in_tokens is not None

    def fill_in_stops(self, prompt: Collection[int]) -> list[int]:
        """The ids that end the answer to a fill-in-the-middle prompt, besides the model's own; empty for other prompts."""
        return [] if self._fill_in_tokens is None else list(self._fill_in_tokens.end(prompt))

    async def fill_in(self, principal: str, text: FillInText, context_tokens: int, room: int | None = None) -> list[int]:
        """The ids of a fill-in-the-middle prompt. Context and text beyond `room` tokens are left out.

        Raises APIError.
        """
        tokens = self._fill_in_tokens
        if tokens is None:
            message = "This model's tokenizer has no fill-in-the-middle tokens; omit 'suffix', or serve a code model."
            raise APIError(400, message, "suffix", "unsupported_parameter")
        if isinstance(text.prefix, list):
            await self.text(principal, text.prefix, context_tokens)
        return await self._run(principal, text.characters, partial(self._fill_in, tokens, text, context_tokens, room))

    def _fill_in(
        self, tokens: FillInTokens, text: FillInText, context_tokens: int, room: int | None, tokenizer: AnyTokenizer
    ) -> list[int]:
        if isinstance(text.prefix, str):
            self._check_length("prompt", text.prefix, context_tokens, tokenizer)
        self._check_length("suffix", text.suffix, context_tokens, tokenizer)
        self._check_length("input_extra", "\n".join(part for file in text.files for part in file), context_tokens, tokenizer)
        parts = encode_parts(tokens, text, partial(self._encode_plain, "prompt", context_tokens, tokenizer))
        start = encode(tokenizer, "")[:1]  # most code models begin a text with nothing, some with a BOS token
        begin = start if start == [tokenizer.bos_token_id] else []
        if room is not None:
            parts = fit(parts, room - len(begin) - MARKER_COUNT)
        return [*begin, *assemble(tokens, parts)]

    async def decode(self, principal: str, tokens: list[int], context_tokens: int) -> str:
        """The text of token ids. Raises APIError."""
        tokens = await self.text(principal, tokens, context_tokens)
        return await self._run(principal, len(tokens), lambda tokenizer: str(tokenizer.decode(tokens)))

    async def _run(self, principal: str, size: int, work: Callable[[AnyTokenizer], T]) -> T:
        """Runs `work` in place if its input is short, else in a thread."""
        await self.prepare()
        if size <= INLINE_CHARACTERS and self._pool.is_idle(self._loaded):
            return work(self._tokenizer)
        return await self._pool.run(principal, lambda tokenizer: work(tokenizer()))

    def _encode(self, field: str, context_tokens: int, tokenizer: AnyTokenizer, text: str) -> list[int]:
        self._check_length(field, text, context_tokens, tokenizer)
        return encode(tokenizer, text)

    def _encode_plain(
        self, field: str, context_tokens: int, tokenizer: AnyTokenizer, text: str, continues: bool = False
    ) -> list[int]:
        """See `PlainText.encode`. Raises APIError if the text spells more markers than the context has tokens."""
        self._check_length(field, text, context_tokens, tokenizer, self._plain.count_markers(text))
        return self._plain.encode(tokenizer, text, continues)

    def _check_length(self, field: str, text: str, context_tokens: int, tokenizer: AnyTokenizer, markers: int = 0) -> None:
        """Raises APIError if the text, which spells some markers, cannot fit, whatever its other tokens are."""
        if max(markers, len(text) / self._longest_token) > context_tokens:
            sample = text[:SAMPLE_CHARACTERS]
            tokens = len(self._plain.encode(tokenizer, sample)) * len(text) // len(sample)
            raise ContextExceeded(max(tokens, context_tokens + 1), context_tokens, field, is_estimate=True)

    def _chat(
        self,
        template: ChatTemplate,
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions,
        context_tokens: int,
        pictures: RequestPictures,
        tokenizer: AnyTokenizer,
    ) -> list[int]:
        marked = [self._marks.mark({**message, "role": ""}) | {"role": message["role"]} for message in messages]
        try:
            text = template.write(
                marked,
                self._marks.mark(list(options.tools)),
                self._marks.mark(dict(options.arguments)),
                options.format,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
            )
        except TEMPLATE_ERRORS as error:
            raise APIError(
                400, f"The chat template rejects these messages: {str(error).rstrip('.')}.", "messages", "template_error"
            ) from None
        text = with_pictures(text, pictures)
        self._check_length("messages", text, context_tokens, tokenizer, count_marks(text))
        return self._marks.encode(text, partial(encode, tokenizer, add_special_tokens=False))
