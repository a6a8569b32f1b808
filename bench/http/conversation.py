"""`python -m bench.http.conversation`: an agent's loop over HTTP without session ids, with and without automatic sessions.

Ten turns: a prompt of 6,000 tokens at first, then each turn adds the answer and 400 more tokens. Then four requests at once
that share their first 6,000 tokens. The model is the embedded one with a longer context: only times and reused tokens count.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench import report
from bench.http.client import new_client, served_model
from bench.http.process import start_server
from outrider import models

CONTEXT_TOKENS = 16_384
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 6000, 400, 32
TURNS, AGENTS = 10, 4
SOURCES = Path(__file__).parents[2]


def long_model(folder: Path, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """A copy of the embedded model with a context of `context_tokens`."""
    copied = shutil.copytree(models.TARGET, folder / "long")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context_tokens}))
    return copied


async def tokens_of_sources(client: httpx.AsyncClient, count: int) -> list[int]:
    """The first `count` tokens of this project's sources."""
    tokens: list[int] = []
    for path in sorted(SOURCES.glob("*/*.py")):
        response = await client.post("/tokenize", json={"prompt": path.read_text()})
        tokens += response.json()["tokens"]
        if len(tokens) >= count:
            return tokens[:count]
    raise ValueError("the sources are too short")


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int]) -> dict[str, Any]:
    """Sends a streaming completion; returns its answer's token ids, milliseconds to the first token, and reused tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    started, first, tokens, usage = time.perf_counter(), 0.0, list[int](), dict[str, Any]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                first = first or time.perf_counter() - started
                tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"tokens": tokens, "first_token_ms": round(1e3 * first, 1), "new_tokens": len(prompt) - cached}


async def converse(url: str) -> dict[str, Any]:
    """The turns of a conversation, and requests of several agents at once."""
    async with new_client(url) as client:
        model = await served_model(client)
        text = await tokens_of_sources(client, FIRST_TOKENS + (TURNS + 1) * TURN_TOKENS)
        await ask(client, model, text[-64:])  # the first request of a process is slower
        prompt, turns = text[:FIRST_TOKENS], []
        for turn in range(TURNS):
            answer = await ask(client, model, prompt)
            turns.append(answer)
            start = FIRST_TOKENS + turn * TURN_TOKENS
            prompt = [*prompt, *answer["tokens"], *text[start : start + TURN_TOKENS]]
        shared = list(reversed(text[:FIRST_TOKENS]))
        started = time.perf_counter()
        agents = await asyncio.gather(*(ask(client, model, [*shared, 300 + agent, *text[:64]]) for agent in range(AGENTS)))
        return {
            "answers": [answer.pop("tokens") for answer in (*turns, *agents)],
            "turns": turns,
            "agents_new_tokens": sum(agent["new_tokens"] for agent in agents),
            "agents_seconds": round(time.perf_counter() - started, 2),
        }


def main(
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "conversation.json",
) -> None:
    """Run the loop on two servers and compare."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model.path", str(long_model(Path(folder))), "--model.dtype", "float32"]
        found = {}
        for automatic in ("off", "on"):
            with start_server([*flags, "--sessions.automatic", automatic]) as server:
                found[automatic] = asyncio.run(converse(server.url))
    same = found["off"].pop("answers") == found["on"].pop("answers")
    rows = []
    for number, (off, on) in enumerate(zip(found["off"]["turns"], found["on"]["turns"], strict=True), start=1):
        ratio = round(off["first_token_ms"] / on["first_token_ms"], 1)
        rows.append((number, off["new_tokens"], on["new_tokens"], off["first_token_ms"], on["first_token_ms"], ratio))
    headers = ("turn", "tokens read", "with sessions", "first token, ms", "with sessions", "ratio")
    report.print_table("A conversation without session ids", headers, rows)
    print(f"{AGENTS} agents: {found['off']['agents_new_tokens']} tokens read without, {found['on']['agents_new_tokens']} with.")
    print("The answers are the same." if same else "The answers differ.")
    report.save(out, {"automatic": found, "same_answers": same})
    if not same:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
