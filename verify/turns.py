"""The special tokens that a chat template writes after an assistant's answer, and within it.

Found by rendering conversations of probes, so every template is read in the same way. A conversation that a template rejects
tells nothing. Knows nothing about models.
"""

import re
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

from outrider.verify import chat_template
from outrider.verify.fast_tokenizer import AnyTokenizer

# Templates look for parts of some words, but not of these.
QUESTION, REASONING, CONTENT, CALL, NEXT = "qvquestion", "qvreasoning", "qvcontent", "qvcall", "qvnext"
PARAMETERS = {"type": "object", "properties": {"value": {"type": "string", "description": ""}}}
FUNCTION = {"name": "qvtool", "description": "", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "qvtool", "arguments": {"value": CALL}}}]


def tokens_after_answer(tokenizer: AnyTokenizer) -> frozenset[int]:
    """The special token that directly follows an answer where another turn of the user follows; empty if there is none."""
    tokens = SpecialTokens(tokenizer)
    for messages, tools in conversations():
        in_parts = isinstance(messages[0]["content"], list)
        answer, has_next, _ = render(tokenizer, [*messages, message("user", NEXT, in_parts)], tools).partition(NEXT)
        if has_next and CONTENT in answer:
            return tokens.at_start(answer.rpartition(CONTENT)[2])
    return frozenset()


def tokens_within_answer(tokenizer: AnyTokenizer) -> frozenset[int]:
    """The special tokens between an answer's reasoning, its content and a call of a tool.

    A template may write the call as an answer of its own. Then, what is before it ends an answer.
    """
    tokens, found = SpecialTokens(tokenizer), frozenset[int]()
    for messages, tools in (*conversations(), *conversations(CALLS)):
        question = render(tokenizer, messages[:1], tools)
        opening = tokens.first_line(render(tokenizer, messages[:1], tools, add_generation_prompt=True).removeprefix(question))
        answer = render(tokenizer, messages, tools).rpartition(QUESTION)[2]
        places = sorted((place, probe) for probe in (REASONING, CONTENT, CALL) if (place := answer.find(probe)) >= 0)
        for (start, before), (end, after) in pairwise(places):
            between = answer[start:end]
            reopens = (before, after) == (CONTENT, CALL) and opening and opening in between
            if not reopens and before != CALL:
                found |= tokens.within(between)
    return found


class SpecialTokens:
    """The added tokens of a tokenizer, as they are found in a rendered conversation."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        added = {str(token): int(id) for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self._ids = {text: id for text, id in added.items() if text.strip()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def at_start(self, text: str) -> frozenset[int]:
        """The token with which a text begins, after white space."""
        found = self._pattern.match(text.lstrip())
        return frozenset() if found is None else frozenset([self._ids[found[0]]])

    def within(self, text: str) -> frozenset[int]:
        return frozenset(self._ids[found] for found in self._pattern.findall(text))

    def first_line(self, text: str) -> str:
        """The text up to its first token, the token included; empty if it has none."""
        found = self._pattern.search(text)
        return "" if found is None else text[: found.end()]


def message(role: str, text: str, in_parts: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}


def conversations(calls: list[dict[str, Any]] | None = None) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """A question and its answer in the forms that templates take, and the tools."""
    thought = {"reasoning_content": REASONING, "reasoning": REASONING, "thinking": REASONING}
    for in_parts, tools, fields in product((False, True), (TOOLS,) if calls else (None, TOOLS), (thought, {})):
        answer = message("assistant", CONTENT, in_parts) | fields | ({"tool_calls": calls} if calls else {})
        yield [message("user", QUESTION, in_parts), answer], tools


def render(tokenizer: AnyTokenizer, messages: list[dict[str, Any]], tools: Any, **options: bool) -> str:
    """The conversation as text; empty if the template rejects it, or if there is none."""
    try:
        template = chat_template.chosen(tokenizer.chat_template, bool(tools))
        return chat_template.render(template, messages, tools, **tokenizer.special_tokens_map, **options)
    except chat_template.ERRORS:
        return ""
