"""Valid JSON that costs a server far more than it costs the client: the named attacks, as data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.soak.connections import Target
from tests.soak.structures import AMBIGUOUS, GRAMMARS, REGEXES, encode, schemas

REPEATS = 60_000  # of a special token
CORPORA = 70


@dataclass(frozen=True)
class Bomb:
    """A request to `path`. `kind` is how its answers are counted."""

    kind: str
    path: str
    body: Callable[[Target], bytes]
    hangs_up: bool = False  # the client leaves before the answer


def named_bombs() -> list[Bomb]:
    """Every named attack, once."""
    kinds = (structures, masks, large_bodies, corpora)
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
        yield chat(
            "schema", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}], tool_choice="required"
        )
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


def special_words(target: Target) -> str:
    """Special tokens, as many as a body has room for."""
    token = max(target.special_tokens, key=len)
    return token * min(REPEATS, (target.body_bytes - 1000) // len(token))


def corpora() -> Iterator[Bomb]:
    """More corpora than a key may have; large ones, of many files or of special tokens; and requests that draft from them."""
    path = "/v1/outrider/corpora"
    for number in range(CORPORA):
        yield send("corpus", path, name=f"c{number}", texts=["x"], default=number % 2 == 0)
    files: dict[str, Any] = {
        "files": lambda target: [{"path": str(n), "text": ""} for n in range((target.body_bytes - 1000) // 40)]
    }
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
