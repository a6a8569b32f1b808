"""`python -m tests.agents`: coding agents from npm each do three tasks against the server.

One needs a tool, and one fills the context, so that the agent must compact the conversation.

The model is the embedded one with a longer context, and its answers are recorded ones (forced replay). Everything else is
real: the agents' programs, HTTP, prompts, tool parsing, sessions and forwards.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.http.process import start_server
from tests.agents.programs import agents, install, run
from tests.agents.script import FINAL_TEXT, TASKS, long_model

CONTEXT_TOKENS = 32_768
FIELDS = ("method", "route", "status", "stream", "prompt_tokens", "cached_tokens", "completion_tokens", "first_token_ms", "ms")


def main(
    only: Annotated[list[str] | None, typer.Option(help="Run only this agent, such as Codex.")] = None,
    programs: Annotated[Path | None, typer.Option(help="Folder with the installed agents; default: a temporary one.")] = None,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "agents.json",
) -> None:
    """Install the agents, run them and save what they asked. Exit code 1 if one of them fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = long_model(folder, CONTEXT_TOKENS)
        flags = ["--model.path", str(model), "--model.dtype", "float32", "--logging.format", "json"]
        with start_server(flags, program="tests.agents.serve") as server:
            chosen = [agent for agent in agents(server.url, model.name, CONTEXT_TOKENS) if not only or agent.name in only]
            if programs is None:
                programs = folder / "programs"
                install([agent.package for agent in chosen], programs)
            rows = []
            for agent, task in product(chosen, TASKS):
                before = len(server.log)
                row = run(agent, task, programs, folder / agent.name.replace(" ", "-") / task)
                row["requests"] = requests_of(server.log[before:])
                rows.append(row | {"passed": passed(row)})
    show(rows)
    report.save(out, {"context_tokens": CONTEXT_TOKENS, "runs": rows})
    if not all(row["passed"] for row in rows):
        raise typer.Exit(1)


def passed(row: dict[str, Any]) -> bool:
    """Whether the agent ran its tool if the task needs it, compacted where it must, printed the final text, and ended well.

    opencode goes on after a refused prompt and does the task, but ends with exit code 1 then.
    """
    if FINAL_TEXT not in row["output"] or row["tool_ran"] != (row["task"] == "tools"):
        return False
    return compacted(row["requests"]) if row["task"] == "overflow" else row["exit_code"] == 0


def compacted(requests: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the agent went on with a shorter prompt after its longest one, or after one that was refused."""
    lengths = [request.get("prompt_tokens", CONTEXT_TOKENS) for request in requests]
    longest = lengths.index(max(lengths))
    return any(length < lengths[longest] for length in lengths[longest + 1 :]) and requests[-1]["status"] == 200


def requests_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The requests in a server's log, with what it says about each."""
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [{name: entry[name] for name in FIELDS if name in entry} for entry in entries if entry["message"] == "request"]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints one line per request."""
    cells = []
    for row in rows:
        result = "passed" if row["passed"] else f"failed, exit {row['exit_code']}"
        for request in row["requests"] or [{}]:
            figures = [request.get(name) for name in ("route", "status", "prompt_tokens", "cached_tokens", "first_token_ms")]
            cells.append([row["agent"], row["task"], result, *figures])
    headers = ("agent", "task", "result", "request", "status", "prompt\ntokens", "reused\ntokens", "first\ntoken, ms")
    report.print_table("Coding agents", headers, cells)


if __name__ == "__main__":
    typer.run(main)
