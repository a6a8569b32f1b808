"""From messages or text to token ids; what is long, off the event loop.

Promises that the text of a message never becomes a special token, whatever it says.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from server.http.errors import APIError

T = TypeVar("T")
QUICK_CHARACTERS = 4096  # are tokens in about a millisecond

# Private-use characters around a number stand for special tokens that a user wrote, while the template is rendered.
MARK = re.compile("\ue0f0(\\d+)\ue0f1")

# Prefix, suffix, middle: how models that fill in write the question.
FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


@dataclass(frozen=True)
class Template:
    """What a request asks of the chat template."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True  # end with the opening of the assistant's turn
    continue_final: bool = False  # leave the last message open
    tools: Sequence[dict[str, Any]] = ()


class PromptEncoder:
    """The model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # One at a time: encoding with and without special tokens switches the tokenizer itself.
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "outrider-tokenizer")
        added = (str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        self._special = sorted({*tokenizer.all_special_tokens, *added}, key=lambda text: (-len(text), text))
        self._special_pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        return str(self._tokenizer.chat_template or "")

    def ends_with(self, prompt: list[int], text: str) -> bool:
        """Whether the prompt's text ends with `text`, spaces left out."""
        return str(self._tokenizer.decode(prompt[-16:])).rstrip().endswith(text)

    @property
    def size(self) -> int:
        """Token ids are below it."""
        return len(self._tokenizer)

    async def chat(self, messages: Sequence[dict[str, Any]], template: Template) -> list[int]:
        """The ids of the rendered conversation. Raises APIError."""
        if not self._tokenizer.chat_template:
            raise APIError(400, "This model has no chat template; use /v1/completions.", "messages", "no_chat_template")
        size = sum(len(str(message)) for message in messages) + sum(len(str(tool)) for tool in template.tools)
        return await self._run(size, partial(self._chat, messages, template))

    async def text(self, prompt: str | list[int]) -> list[int]:
        """The ids of plain text as the model's tokenizer gives them, or the given ids. Raises APIError."""
        if isinstance(prompt, str):
            return await self._run(len(prompt), partial(self._ids, prompt))
        highest = len(self._tokenizer)
        if any(not 0 <= token < highest for token in prompt):
            raise APIError(400, f"Invalid 'prompt': token ids must be from 0 to {highest - 1}.", "prompt", "invalid_value")
        return prompt

    async def plain(self, text: str) -> list[int]:
        """The ids of a text as it would stand within an answer: no special tokens are added, none are read from it."""
        encode = partial(self._ids, text, add_special_tokens=False, split_special_tokens=True)
        return await self._run(len(text), encode)

    async def fill_in(self, prompt: str | list[int], suffix: str) -> list[int]:
        """The ids that ask for what stands between `prompt` and `suffix`. Raises APIError."""
        known = self._tokenizer.get_vocab()
        marks = next((marks for marks in FILL_IN if all(mark in known for mark in marks)), None)
        if marks is None:
            message = "This model's tokenizer has no tokens for filling in; leave 'suffix' out."
            raise APIError(400, message, "suffix", "unsupported_parameter")
        before = await self.plain(prompt) if isinstance(prompt, str) else await self.text(prompt)
        first, second, third = (int(known[mark]) for mark in marks)
        return [first, *before, second, *await self.plain(suffix), third]

    async def decode(self, prompt: str | list[int]) -> str:
        """The text of a prompt, however it was given. Raises APIError."""
        if isinstance(prompt, str):
            return prompt
        tokens = await self.text(prompt)
        return await self._run(len(tokens), partial(self._text, tokens))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, in the thread where it takes long: a thread costs as much as a short text does."""
        if size <= QUICK_CHARACTERS and self._lock.acquire(blocking=False):
            try:
                return work()
            finally:
                self._lock.release()

        def locked() -> T:
            with self._lock:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, locked)

    def _ids(self, text: str, **options: bool) -> list[int]:
        text.encode()  # half a surrogate pair raises UnicodeEncodeError here, and who knows what in a tokenizer
        return list(self._tokenizer.encode(text, **options))

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _chat(self, messages: Sequence[dict[str, Any]], template: Template) -> list[int]:
        marked = [message | self._marked({**message, "role": ""}) | {"role": message["role"]} for message in messages]
        tools = {"tools": self._marked(list(template.tools))} if template.tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                marked,
                tokenize=False,
                add_generation_prompt=template.generation_prompt,
                continue_final_message=template.continue_final,
                **tools,
                **template.arguments,
            )
        except (TemplateError, ValueError) as error:
            raise APIError(400, f"The chat template refuses these messages: {error}.", "messages", "template_error") from None
        ids: list[int] = []
        pieces = MARK.split(str(text))
        for i, piece in enumerate(pieces):
            if i % 2:
                ids += self._ids(self._special[int(piece)], add_special_tokens=False, split_special_tokens=True)
            elif piece:
                ids += self._ids(piece, add_special_tokens=False)
        return ids

    def _marked(self, value: Any) -> Any:
        """The value with all texts in it marked."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, dict):
            return {self._mark(name): self._marked(inner) for name, inner in value.items()}
        return [self._marked(inner) for inner in value] if isinstance(value, list) else value

    def _mark(self, content: str) -> str:
        clean = content.replace("\ue0f0", "").replace("\ue0f1", "")
        return self._special_pattern.sub(lambda found: f"\ue0f0{self._special.index(found[0])}\ue0f1", clean)
