"""The agents: their npm packages, command lines and settings for a local server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plan import BenchError
from tests.agents.script import PROOF, PROOF_TEXT, TASKS

AGENT_SECONDS = 240
INSTALL_SECONDS = 600
# This much of each agent's output is in the results.
OUTPUT_CHARACTERS = 1500
# In the results, this stands for the temporary folder that an agent ran in.
FOLDER = "FOLDER"
KEY = "no-key"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Agent:
    """A coding agent that runs one task without a terminal."""

    name: str
    package: str
    command: tuple[str, ...]  # of the program in node_modules/.bin; the task is its last argument
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)  # in its working folder


def agents(url: str, model: str, context_tokens: int) -> list[Agent]:
    """All agents, with their settings for a server."""
    return [
        claude_code(url, model),
        codex(url, model, context_tokens),
        opencode(url, model, context_tokens),
        cline(url, model),
        continue_cli(url, model, context_tokens),
    ]


def claude_code(url: str, model: str) -> Agent:
    names = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    return Agent(
        name="Claude Code",
        package="@anthropic-ai/claude-code@2.1.330",
        command=("claude", "--print", "--dangerously-skip-permissions"),
        environment={
            **{f"ANTHROPIC_{name}": model for name in names},
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # as root, it skips permissions only in a sandbox
        },
    )


def codex(url: str, model: str, context_tokens: int) -> Agent:
    provider = f'{{name="Outrider", base_url="{url}/v1", wire_api="responses", env_key="OUTRIDER_KEY"}}'
    settings = {
        "model": json.dumps(model),
        "model_provider": '"outrider"',
        "model_providers.outrider": provider,
        "model_context_window": str(context_tokens),
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    flags += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Agent("Codex", "@openai/codex@0.169.0", ("codex", "exec", *flags), {"OUTRIDER_KEY": KEY})


def opencode(url: str, model: str, context_tokens: int) -> Agent:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {model: {"limit": {"context": context_tokens, "output": 1024}}},
    }
    settings = {
        "provider": {"outrider": provider},
        "model": f"outrider/{model}",
        "permission": {"bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    return Agent(
        name="opencode",
        package="opencode-ai@1.18.33",
        command=("opencode", "run"),
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        files={"opencode.json": json.dumps(settings)},
    )


def cline(url: str, model: str) -> Agent:
    settings = {"provider": "openai-compatible", "apiKey": KEY, "model": model, "baseUrl": f"{url}/v1"}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": {"openai-compatible": entry}}
    return Agent(
        name="Cline",
        package="cline@3.0.65",
        command=("cline", "--data-dir", ".cline"),  # with a folder of its own, it leaves no process behind
        environment={},
        files={".cline/settings/providers.json": json.dumps(providers)},
    )


def continue_cli(url: str, model: str, context_tokens: int) -> Agent:
    settings = {
        "name": model,
        "provider": "openai",
        "model": model,
        "apiBase": f"{url}/v1",
        "apiKey": KEY,
        "roles": ["chat"],
        "defaultCompletionOptions": {"contextLength": context_tokens},
    }
    return Agent(
        name="Continue",
        package="@continuedev/cli@1.5.47",
        command=("cn", "--config", "continue.yaml", "--auto", "--print"),
        environment={"CONTINUE_METRICS_ENABLED": "0"},
        files={"continue.yaml": json.dumps({"name": "local", "version": "1.0.0", "schema": "v1", "models": [settings]})},
    )


def install(packages: list[str], folder: Path) -> None:
    """Installs npm packages into a folder. Raises BenchError."""
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except FileNotFoundError:
        raise BenchError("npm is not installed; install Node.js.") from None
    except subprocess.CalledProcessError as error:
        raise BenchError(f"npm cannot install the agents: {error.stderr.strip()}") from None


def run(agent: Agent, task: str, programs: Path, folder: Path) -> dict[str, Any]:
    """Runs a task of TASKS in an empty folder: the agent's exit code (None after AGENT_SECONDS), and whether its tool ran."""
    work = folder / "work"
    work.mkdir(parents=True)
    for name, text in agent.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    started = time.perf_counter()
    code, output = execute(agent, TASKS[task], programs, folder, work)
    proof = work / PROOF
    return {
        "agent": agent.name,
        "package": agent.package,
        "task": task,
        "exit_code": code,
        "tool_ran": proof.exists() and proof.read_text().strip() == PROOF_TEXT,
        "seconds": round(time.perf_counter() - started, 1),
        "output": COLOURS.sub("", output).replace(str(folder), FOLDER)[-OUTPUT_CHARACTERS:],
    }


def execute(agent: Agent, prompt: str, programs: Path, folder: Path, work: Path) -> tuple[int | None, str]:
    """The exit code and the output of an agent that does a task in `work`, with `folder` for its own files."""
    program, *arguments = agent.command
    home, log = folder / "home", folder / "output.txt"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **agent.environment}  # no keys and no proxies of this user
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(programs / "node_modules" / ".bin" / program), *arguments, prompt],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(AGENT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the agent may leave processes behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")
