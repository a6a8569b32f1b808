"""The model's chat templates: which one counts for a request, and how it renders a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outrider.server.chat.template.abilities import PLAIN, Message, TemplateAbilities, probe
from outrider.server.chat.template.form import fit
from outrider.server.chat.template.tool_text import complete
from outrider.server.chat.tools import FORMATS, ToolFormat
from outrider.verify import chat_template
from outrider.verify.chat_template import DEFAULT, TOOL_USE
from outrider.verify.chat_template import ERRORS as TEMPLATE_ERRORS

if TYPE_CHECKING:
    from outrider.verify.fast_tokenizer import AnyTokenizer

USER = {"role": "user", "content": "a"}


class ChatTemplate:
    def __init__(self, tokenizer: AnyTokenizer, text: str) -> None:
        self.text = text
        self._special: dict[str, Any] = {"bos_token": "", "eos_token": "", **tokenizer.special_tokens_map}
        # Templates from before there were tools take the functions as text, and the date.
        self._takes_functions_as_text = bool(re.search(r"\+ functions\b", text)) and "{% for tool" not in text
        self._no_tools: list[dict[str, Any]] | None = None  # what stands in the place of tools where there are none
        if not self.try_render([USER]):  # templates of `tool_use` may need a list
            self._no_tools = []
            self._no_tools = [] if self.try_render([USER]) else None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """The text of messages, exactly as the template writes them. `options` as in `outrider.verify.chat_template.render`.

        Raises TEMPLATE_ERRORS.
        """
        variables: dict[str, Any] = {}
        if self._takes_functions_as_text:
            functions = json.dumps([tool["function"] for tool in tools], indent=2, ensure_ascii=False)
            variables |= {"functions": functions, "datetime": f"{datetime.now():%Y-%m-%d}"}
        given = {**self._special, **variables, **(arguments or {}), **options}
        return chat_template.render(self.text, list(messages), list(tools) or self._no_tools, **given)

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        format: ToolFormat = FORMATS["hermes"],
        **options: Any,
    ) -> str:
        """The text of a conversation in the form that the template takes, or else in the plainest form.

        Raises TEMPLATE_ERRORS.
        """
        able = self.abilities
        plain = replace(PLAIN, parts_only=able.parts_only)
        first: Exception | None = None
        ways = (able, False), (able, True), (replace(able, tools=False), False), (plain, False)
        for abilities, completes in ways:
            try:
                described = list(map(complete, tools)) if completes else tools
                fitted = fit(messages, described, abilities, format)
                return self.render(fitted, described if abilities.tools else (), arguments, **options)
            except TEMPLATE_ERRORS as error:
                first = first or error
        assert first is not None
        raise first

    def try_render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text of messages of the server's own; empty if the template refuses them."""
        try:
            return self.render(messages, tools)
        except TEMPLATE_ERRORS:
            return ""

    @cached_property
    def abilities(self) -> TemplateAbilities:
        """The forms of a conversation that the template takes."""
        return probe(self.try_render)

    @cached_property
    def picture_roles(self) -> frozenset[str]:
        """The roles in whose messages the template has places for pictures."""
        parts = [{"type": "text", "text": "a picture"}]
        asked = {"role": "user", "content": parts}
        before: dict[str, list[Message]] = {"user": [], "tool": [asked]}
        return frozenset(
            role
            for role, messages in before.items()
            if self.try_render([*messages, {"role": role, "content": parts}])
            != self.try_render([*messages, {"role": role, "content": [*parts, {"type": "image"}]}])
        )


class ChatTemplates:
    """All templates of a tokenizer, by name."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        given: Any = tokenizer.chat_template
        named = given if isinstance(given, dict) else {DEFAULT: given}
        self._named = {name: ChatTemplate(tokenizer, text) for name, text in named.items() if text}

    def __bool__(self) -> bool:
        return bool(self._named)

    def choose(self, has_tools: bool) -> ChatTemplate:
        """The template of requests with tools, or without them. There must be one."""
        order = (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,)
        name = next((name for name in order if name in self._named), next(iter(self._named)))
        return self._named[name]

    def probe(self) -> None:
        """Finds the abilities of those that are used, so that no request waits for it."""
        for template in {self.choose(each) for each in (False, True)} if self else ():
            _ = template.abilities

    @property
    def text(self) -> str:
        """The texts of those that are used."""
        return "\n".join(dict.fromkeys(self.choose(each).text for each in (False, True))) if self else ""
