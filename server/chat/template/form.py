"""Conversations in the form that a chat template takes.

Promises that nothing gets lost, and that a conversation which grows keeps its beginning: what becomes of a message depends on
the template and on the messages before it, never on those after the next answer. At most the last message grows.
"""

from collections.abc import Sequence
from typing import Any

from outrider.server.chat.template.abilities import Message, TemplateAbilities, in_parts, with_argument_texts
from outrider.server.chat.template.tool_text import calls_text, result_text, tools_text
from outrider.server.chat.tools import ToolFormat

# Stands for a message that the template requires and nobody has written.
FILLER = "..."
SEPARATOR = "\n\n"


def fit(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], abilities: TemplateAbilities, format: ToolFormat
) -> list[Message]:
    """The messages as the template takes them. `tools` are described in them if the template does not render tools.

    `format` is how calls are written that the template does not render.
    """
    form = Form(abilities, format)
    if tools and not abilities.tools:
        text = tools_text(tools, format, results_are_text=not (abilities.calls or abilities.loose_results))
        form.add({"role": "system", "content": text})
        form.joins_system = True
    for message in in_order(messages):
        form.add(message)
    if not abilities.system_alone and all(message["role"] == "system" for message in form.messages):
        form.messages.append({"role": "user", "content": FILLER})
    fitted = map(with_argument_texts, form.messages) if abilities.argument_texts else form.messages
    return list(map(in_parts, fitted) if abilities.parts_only else fitted)


def in_order(messages: Sequence[Message]) -> list[Message]:
    """The messages, with system messages that directly follow a user's before it.

    Models are trained to answer the user's message when it is the last one; small ones else go on with the system's.
    """
    ordered: list[Message] = []
    for message in messages:
        follows = message["role"] == "system" and bool(ordered) and ordered[-1]["role"] == "user"
        ordered.insert(len(ordered) - follows, message)
    return ordered


class Form:
    """The conversation so far, as the template takes it."""

    def __init__(self, abilities: TemplateAbilities, format: ToolFormat) -> None:
        self.messages: list[Message] = []
        self.joins_system = False  # the next message joins the server's own system message if it is one, too
        self._abilities = abilities
        self._format = format
        self._in_head = True  # only system messages so far
        self._turn: str | None = None  # the role of the last message that alternates
        self._called: set[str] = set()  # ids of the calls that the template renders

    def add(self, message: Message) -> None:
        match message["role"]:
            case "system":
                self._add_system(message)
                return
            case "assistant":
                self._add_answer(message)
            case "tool" if not (message.get("tool_call_id") in self._called or self._abilities.loose_results):
                self._append({"role": "user", "content": result_text(message["content"])})
            case "tool":
                self.messages.append(message)
            case _:
                self._append(message, joins=self._in_head and not self._abilities.system)
        self._in_head = self.joins_system = False

    def _add_system(self, message: Message) -> None:
        """Adds a system message: at the beginning, joined to the first, or as the user's."""
        if not self._in_head and not self._abilities.system_anywhere:
            self._append({"role": "user", "content": message["content"]})
        elif not self._abilities.system:
            self._append({"role": "user", "content": message["content"]}, joins=True)
        elif self.messages and self._in_head and (self.joins_system or not self._abilities.system_anywhere):
            self._join(message)
        else:
            self.messages.append(message)
        self.joins_system = False

    def _add_answer(self, message: Message) -> None:
        """Adds a message of the assistant. Calls that the template does not render become text."""
        calls, text = message.get("tool_calls") or [], message["content"]
        if not calls:
            self._append(message)
            return
        alone, able = {key: value for key, value in message.items() if key != "tool_calls"}, self._abilities
        if not (able.calls and (len(calls) == 1 or able.several_calls or able.repeats)):
            functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            self._append(joined(alone, {"content": calls_text(functions, self._format)}, "\n"))
            return
        self._called.update(id for call in calls if (id := call.get("id")))
        if text and not able.text_with_calls and able.repeats:
            self._append(alone)
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        elif text and message.get("reasoning_content") and not able.reasoning_with_text:
            reasoning = SEPARATOR.join((message["reasoning_content"], plain_text(text)))
            message = {**message, "content": "", "reasoning_content": reasoning}
        if able.several_calls:
            self.messages.append(message)
            return
        self.messages.append({**message, "tool_calls": calls[:1]})
        self.messages += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]

    def _append(self, message: Message, joins: bool = False) -> None:
        """Appends a message of the user, or one of the assistant without calls.

        With `joins`, a message of the same role takes it up. Where roles must alternate, that is always so.
        """
        role, able = message["role"], self._abilities
        if not message["content"] and not able.empty:
            message = {**message, "content": FILLER}
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == role and not last.get("tool_calls") and (joins or not able.repeats):
            self._join(message)
        else:
            if not able.repeats and role == (self._turn or "assistant"):
                self.messages.append({"role": "user" if role == "assistant" else "assistant", "content": FILLER})
            self.messages.append(message)
        self._turn = role

    def _join(self, message: Message) -> None:
        self.messages[-1] = joined(self.messages[-1], message)


def joined(first: Message, second: Message, separator: str = SEPARATOR) -> Message:
    """Two messages of one role as one."""
    contents = first["content"], second["content"]
    if all(isinstance(content, str) for content in contents):
        content: Any = separator.join(filter(None, contents))
    else:
        one, two = (as_parts(content) for content in contents)
        content = [*one, *([{"type": "text", "text": separator}] if one and two else []), *two]
    reasoning = SEPARATOR.join(each["reasoning_content"] for each in (first, second) if each.get("reasoning_content"))
    return {**first, "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def as_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def plain_text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
