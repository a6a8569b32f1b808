"""Valid JSON that costs a server far more than it costs the client: the named attacks, as data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.soak.attacks.encoding import encode, nested, raw
from tests.soak.attacks.structures import AMBIGUOUS, GRAMMARS, REGEXES, schemas
from tests.soak.attacks.target import Target

TINY = (5e-324, 1e-46, 1e-40)
REPEATS = 60_000  # of a special token
DIGITS = 5000  # of a logit_bias key
STOP_IDS = 3796
CORPORA = 70
DEEP = 600


@dataclass(frozen=True)
class Bomb:
    """A request to `path`. `kind` is how its answers are counted."""

    kind: str
    path: str
    body: Callable[[Target], bytes]
    hangs_up: bool = False  # the client leaves before the answer


def named_bombs() -> list[Bomb]:
    """Every named attack, once."""
    kinds = (structures, masks, large_bodies, tool_grammars, numbers, special_tokens, shares, stored, corpora, nesting)
    return [bomb for kind in kinds for bomb in kind()]


def send(kind: str, path: str, hangs_up: bool = False, **fields: Any) -> Bomb:
    """A bomb with these fields. A field that is a function is called with the target."""

    def body(target: Target) -> bytes:
        filled = {name: value(target) if callable(value) else value for name, value in fields.items()}
        return encode({"model": target.model, **filled})

    return Bomb(kind, path, body, hangs_up)


def completion(kind: str, prompt: Any = "x", hangs_up: bool = False, **fields: Any) -> Bomb:
    return send(kind, "/v1/completions", hangs_up, **{"max_tokens": 4, "prompt": prompt, **fields})


def chat(kind: str, content: Any = "x", hangs_up: bool = False, **fields: Any) -> Bomb:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return send(kind, "/v1/chat/completions", hangs_up, messages=messages, **{"max_tokens": 4, **fields})


def response(kind: str, text: Any = "x", **fields: Any) -> Bomb:
    return send(kind, "/v1/responses", **{"input": text, "max_output_tokens": 1, **fields})


def message(kind: str, content: Any = "x", hangs_up: bool = False, **fields: Any) -> Bomb:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return send(kind, "/v1/messages", hangs_up, messages=messages, **{"max_tokens": 4, **fields})


def infill(kind: str, prefix: Any = "x", hangs_up: bool = False, **fields: Any) -> Bomb:
    return send(kind, "/infill", hangs_up, **{"n_predict": 4, "input_prefix": prefix, "input_suffix": "x", **fields})


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def structures() -> Iterator[Bomb]:
    """Grammars, expressions and schemas that are deep, long or ambiguous."""
    for grammar in GRAMMARS:
        yield completion("grammar", grammar=grammar)
        yield infill("grammar", grammar=grammar)
    for regex in REGEXES:
        yield completion("regex", regex=regex)
    for schema in schemas():
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        yield chat("schema", response_format=form)
        yield chat("schema", tools=[tool(schema)], tool_choice="required")
        yield response("schema", text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
        yield message("schema", output_config={"format": {"type": "json_schema", "schema": schema}})
        yield message("schema", tools=[{"name": "f", "input_schema": schema, "strict": True}], tool_choice={"type": "any"})
        yield completion("schema", grammar="start: %json " + encode(schema).decode())


def masks() -> Iterator[Bomb]:
    """A grammar whose masks are slow, for every node of a long draft."""
    letters = "".join(chr(ord("a") + number % 26) for number in range(1000))
    draft: dict[str, Any] = {"prediction": {"type": "content", "content": letters}, "max_tokens": 1000, "ignore_eos": True}
    speculation = {"drafter": "prediction", "max_nodes": 128}
    yield completion("masks", grammar=AMBIGUOUS, **draft, speculation=speculation)
    yield completion("masks", grammar=AMBIGUOUS, **draft, speculation=speculation, hangs_up=True)


def large_bodies() -> Iterator[Bomb]:
    """Bodies whose validation takes far longer than their transfer; most of them are not valid."""
    empty = [{"type": "text", "text": ""}] * 2
    turns = [{"role": role, "content": empty} for role in ("user", "assistant")]
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    functions = [{"type": "function", "name": "f"}] * 20
    space = {"type": "namespace", "name": "n", "description": "", "tools": functions}
    numbers = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "1," * 20_000 + "1]"}}
    for _ in range(4):  # several at a time, since clients share these bombs
        yield message("large body", messages=copies(turns, 5000))
        yield send("large body", "/v1/messages/count_tokens", messages=copies([{"role": "user", "content": empty * 10}], 2040))
        yield response("large body", tools=copies([space], 1000))
        yield response("large body", copies([called], 16_384))
        messages = [{"role": "assistant", "content": "", "tool_calls": [numbers]}]
        yield chat("large body", messages=copies(messages, 60))


def copies(items: list[Any], most: int) -> Callable[[Target], list[Any]]:
    """A list `most` times, or as often as a body has room for it."""
    return lambda target: items * min(most, (target.body_bytes - 1000) // (len(encode(items)) + 1))


def tool_grammars() -> Iterator[Bomb]:
    """The same grammars and expressions as the input of custom tools."""
    for syntax, definition in (*(("lark", grammar) for grammar in GRAMMARS), *(("regex", regex) for regex in REGEXES)):
        grammar = {"syntax": syntax, "definition": definition}
        custom = {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": grammar}}}
        yield chat("tool grammar", tools=[custom], tool_choice="required")
        custom = {"type": "custom", "name": "f", "format": {"type": "grammar", **grammar}}
        yield response("tool grammar", tools=[custom], tool_choice={"type": "custom", "name": "f"})


def longest_token(target: Target) -> str:
    return max(target.special_tokens, key=len)


def numbers() -> Iterator[Bomb]:
    """Numbers that are tiny, long or not numbers, under both verification rules."""
    names, rules = ("temperature", "repetition_penalty", "top_p", "min_p"), ("keyed", "rejection")
    for value, name, rule in itertools.product(TINY, names, rules):
        fields: dict[str, Any] = {"temperature": 1, name: value, "speculation": {"rule": rule}}
        yield completion("float", **fields)
        yield infill("float", **fields)
    for value in (float("nan"), float("inf"), 1e308):
        yield completion("float", logit_bias={"5": value})
        yield response("float", tools=[{"type": "function", "name": "f", "parameters": {"x": value}}])
    yield completion("number", logit_bias={"9" * DIGITS: 1})
    yield completion("number", logit_bias={"-" + "9" * DIGITS: 1})
    yield completion("number", seed=lambda target: raw("9" * (target.body_bytes - 1000)))
    yield completion("stop ids", stop_token_ids=list(range(STOP_IDS)), min_tokens=64, max_tokens=64, ignore_eos=True)
    yield completion("stop ids", stop_token_ids=lambda target: list(range(target.vocabulary_size)), min_tokens=9)


def special_words(target: Target) -> str:
    """Special tokens, as many as a body has room for."""
    token = longest_token(target)
    return token * min(REPEATS, (target.body_bytes - 1000) // len(token))


def special_tokens() -> Iterator[Bomb]:
    """Long texts of special tokens, as prompts and as arguments of the template, from clients that leave and that stay."""

    def turn(target: Target) -> list[dict[str, str]]:
        return [{"role": "user", "content": special_words(target)}]

    for hangs_up in (True, False):
        kind = "special tokens, hang up" if hangs_up else "special tokens"
        yield completion(kind, special_words, hangs_up)
        yield completion(
            kind, hangs_up=hangs_up, prediction=lambda target: {"type": "content", "content": special_words(target)}
        )
        yield send(kind, "/tokenize", hangs_up, prompt=special_words)
        yield infill(kind, special_words, hangs_up)
        yield infill(kind, hangs_up=hangs_up, input_extra=lambda target: [{"text": special_words(target), "filename": "x"}])
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            yield send(kind, path, hangs_up, max_tokens=1, messages=turn)
        yield chat(kind, messages=turn, hangs_up=hangs_up)
        yield chat(kind, hangs_up=hangs_up, reasoning_effort=special_words)
        yield chat(kind, hangs_up=hangs_up, chat_template_kwargs=lambda target: {"reasoning_effort": special_words(target)})
    yield chat("special tokens", reasoning_effort=lambda target: "low" + target.special_tokens[0])


def shares() -> Iterator[Bomb]:
    """Requests for more than one client's share: many choices, many prompts, large answers."""
    long: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 250}
    yield completion("choices", n=16, **long)
    yield completion("choices", n=16, stream=True, **long)
    yield completion("choices", n=16, hangs_up=True, **(long | {"max_tokens": None}))
    yield chat("choices", n=16, hangs_up=True, **long)
    yield completion("prompts", ["x"] * 64, n=16, **long)
    yield completion("prompts", ["x " * 200] * 64, best_of=16, hangs_up=True, **long)
    scored: dict[str, Any] = {"prompt": lambda target: [5] * (target.context_tokens - 20), "max_tokens": 8, "echo": True}
    yield completion("echo", **scored, logprobs=5, n=8)
    yield completion("echo", **scored, logprobs=20, n=16, stream=True, return_token_ids=True)
    yield infill("choices", hangs_up=True, **(long | {"max_tokens": None, "n_predict": -1}))
    yield message("choices", hangs_up=True, stop_sequences=["\n" * 9] * 4, max_tokens=250, temperature=1)
    yield completion("session", session_id="one of many", hangs_up=True, **long)


def stored(kept: int = 3_800_000) -> Iterator[Bomb]:
    """Responses that are stored with all that the client sent."""

    def text(target: Target) -> str:
        return "x" * min(kept, target.body_bytes - 1000)

    yield response("store", metadata=lambda target: {"key": text(target)})
    yield response("store", metadata=lambda target: {str(number): "x" for number in range(len(text(target)) // 20)})
    yield response("store", user=text)
    yield response("store", tools=lambda target: [{"type": "function", "name": "f", "description": text(target)}])
    yield response("store", text={"format": {"type": "json_schema", "name": "x", "description": "x" * 50_000, "schema": {}}})
    yield response("store", metadata={str(number): "x" * 512 for number in range(16)})  # as much as OpenAI allows


def corpora() -> Iterator[Bomb]:
    """More corpora than a key may have; large ones, of many files or of special tokens; and requests that draft from them."""
    path = "/v1/outrider/corpora"
    for number in range(CORPORA):
        yield send("corpus", path, name=f"c{number}", texts=["x"], default=number % 2 == 0)
    files: dict[str, Any] = {"files": lambda target: many_files((target.body_bytes - 1000) // 40)}
    texts: dict[str, Any] = {"texts": lambda target: ["x " * ((target.body_bytes - 1000) // 2)]}
    tokens: dict[str, Any] = {"texts": lambda target: [special_words(target)]}
    for hangs_up in (False, True):
        for fields in (files, texts, tokens):
            yield send("corpus", path, hangs_up, name="c0", **fields)
    for name in ("../bystander", ".default", "c0/../../x", "", "a" * 65):
        yield send("corpus", path, name=name, texts=["x"])
        yield completion("corpus", speculation={"drafter": "retrieval", "corpus": name})
    yield send("corpus", path, name="c0", remove=copies(["x"], 100_000))
    yield completion("corpus", "x x", ignore_eos=True, max_tokens=64, speculation={"drafter": "retrieval", "corpus": "c0"})
    yield send("corpus", "/remove_external_corpus", corpus_id="c0")


def many_files(count: int) -> list[dict[str, str]]:
    return [{"path": str(number), "text": ""} for number in range(count)]


def nesting() -> Iterator[Bomb]:
    """Values inside of values: DEEP levels, and more than the json module reads."""
    for levels in (DEEP, 900, 50_000):
        text = "[" * levels + "]" * levels
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        yield chat("nesting", messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
        yield response("nesting", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}])
        yield chat("nesting", tools=[tool({"x": nested(levels)})])
        yield response("nesting", tools=[{"type": "function", "name": "f", "parameters": {"x": nested(levels)}}])
        yield chat("nesting", chat_template_kwargs={"enable_thinking": nested(levels)})
        yield completion("nesting", nested(levels))
        yield response("nesting", metadata={"x": nested(levels)})
        called = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": nested(levels)}}
        yield message("nesting", messages=[{"role": "assistant", "content": [called]}])
        yield message("nesting", tools=[{"name": "f", "input_schema": {"x": nested(levels)}}])
