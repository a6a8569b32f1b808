"""`outrider launch` with a stand-in for a server, and programs that print what they got."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.server.cli import app
from outrider.server.launch import command
from outrider.server.launch.programs import Server, prepare, read_programs
from outrider.server.terminal.client import Client
from tests.stand_in import answering


def listed(*cards: dict[str, object]) -> tuple[int, str]:
    return 200, json.dumps({"data": cards})


MODELS = {"/v1/models": listed({"id": "Qwen3-8B", "max_model_len": 40960}, {"id": "other"})}
# Prints its name, its arguments, a variable, and a file that an argument or a variable names; the exit code is 3.
PROGRAM = f"""#!{sys.executable}
import os, sys
print(os.path.basename(sys.argv[0]), sys.argv[1:])
print(os.environ.get("OUTRIDER_API_KEY"), os.environ.get("OPENCODE_CONFIG_CONTENT"))
for name in sys.argv:
    if os.path.isfile(name) and "outrider-" in name:
        print("FOLDER", os.path.dirname(name)); print(open(name).read())
sys.exit(3)
"""


@pytest.fixture
def url() -> Iterator[str]:
    """A server with two models, the second of which is not loaded."""
    with answering(MODELS) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, which are all that is installed."""
    for name in ("pi", "opencode", "cn"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "outrider.server.cli", "launch", *arguments]
    return subprocess.run(run, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("folder")
def test_a_program_runs_with_its_own_arguments_and_a_folder_that_is_gone_afterwards(url: str) -> None:
    done = outrider("pi", "--url", url, "--api-key", "secret", "--", "-p", "a question", "--model", "own")
    assert done.returncode == 3 and not done.stderr
    first, second, third, *file = done.stdout.splitlines()
    assert first.startswith("pi ['--extension', ")
    assert first.endswith("'--provider', 'outrider', '--model', 'Qwen3-8B', '-p', 'a question', '--model', 'own']")
    assert second.startswith("secret ")
    assert f'baseUrl: "{url}/v1"' in "\n".join(file) and "contextWindow: 40960, maxTokens: 8192" in "\n".join(file)
    assert not Path(third.removeprefix("FOLDER ")).exists()


@pytest.mark.usefixtures("folder")
def test_a_running_server_is_used_for_a_model_that_it_has(url: str) -> None:
    config = json.loads(outrider("opencode", "--url", url, "--model", "models/other.gguf").stdout.partition("None ")[2])
    assert config["model"] == "outrider/other"
    assert config["provider"]["outrider"]["models"] == {"other": {"limit": {"context": 32768, "output": 8192}}}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("told", ["much", -1])
def test_a_server_that_tells_no_context_is_used(monkeypatch: pytest.MonkeyPatch, url: str, told: object) -> None:
    monkeypatch.setitem(MODELS, "/v1/models", listed({"id": "x", "max_model_len": told}))
    assert "contextWindow: 32768, maxTokens: 8192" in outrider("pi", "--url", url).stdout


@pytest.mark.usefixtures("folder")
def test_what_is_printed_does_the_same_in_a_shell(url: str) -> None:
    printed = outrider("continue", "--url", url, "--print", "--", "-p", "it's $HOME").stdout
    done = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[0].endswith("""'-p', "it's $HOME"]""")
    assert f'"apiBase": "{url}/v1"' in done.stdout
    assert "FOLDER" in done.stdout


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vim"], "There is no program 'vim'; choose one of claude, codex,"),
        (["codex"], "codex is not installed; install it with: npm install -g @openai/codex"),
        (["pi", "--url", "http://127.0.0.1:1"], "start one with `outrider serve`, or name a model that launch starts: "),
        (["pi", "--url", "http://127.0.0.1:1", "--model", "m"], "No server answers at http://127.0.0.1:1; "),
        (["pi", "--url", "nowhere"], "is not the address of a server"),
        (["pi", "--url", "unix:/run/a.sock"], "pi cannot use a UNIX socket; give --url the HTTP address of a proxy"),
        (["pi", "-p", "hello"], "pi's own arguments follow --"),
        (["pi", "--model.dtype", "float32"], "settings need a --model"),
        (["pi", "--url", "URL", "--model", "third"], "has no model third, but Qwen3-8B, other."),
        (["pi", "--model", "/no/model", "--print"], "start one first: outrider serve --model /no/model"),
        (["pi", "--model", "m", "--model.dtipe", "float32"], "did you mean model.dtype?"),
    ],
)
def test_errors_are_one_sentence(url: str, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["launch", *(url if each == "URL" else each for each in arguments)])
    assert done.exit_code == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("folder")
def test_a_name_that_would_end_its_quotes_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(MODELS, "/v1/models", listed({"id": 'x"}); process.exit()', "max_model_len": 1}))
    assert "has characters that programs may misread" in outrider("pi", "--url", url).stderr


@pytest.mark.usefixtures("folder")
def test_all_programs_are_listed_with_what_installs_them() -> None:
    rows = [line.split() for line in outrider().stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == list(read_programs())
    assert rows[0][1:] == ["no;", "install", "it", "with:", "npm", "install", "-g", "@anthropic-ai/claude-code"]
    assert next(row[1] for row in rows if row[0] == "continue").endswith("/cn")


@pytest.mark.usefixtures("folder")
def test_a_server_that_was_started_ends_with_the_program(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    events: list[str] = []

    class Own:
        key = "own-key"

        def wait_until_ready(self) -> Client:
            return Client(url, self.key)

        def close(self) -> None:
            events.append("closed")

    def start(model: str, config: Path | None, arguments: list[str]) -> Own:
        events.append(shlex.join([model, *arguments]))
        return Own()

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(command, "start", start)
    done = CliRunner().invoke(app, ["launch", "pi", "--model", "m.gguf", "--model.threads", "2"])
    assert done.exit_code == 3, done.output
    assert events == ["m.gguf --model.threads 2", "closed"]


@pytest.mark.parametrize("name", read_programs())
def test_every_program_gets_the_address_the_model_and_the_context(tmp_path: Path, name: str) -> None:
    program = read_programs()[name]
    run = prepare(program, Server("http://host:1", "the-model", 4096, "the-key"), tmp_path, [])
    files = [(tmp_path / file).read_text() for file in program.files]
    said = "\n".join([*run.command, *run.environment.values(), *files])
    assert "http://host:1" in said and "the-model" in said
    assert "the-key" in said and "the-key" not in " ".join(run.command)  # others can read a command
    assert name == "openwebui" or "4096" in said
    assert not any(f"{{{field}}}" in said for field in ("url", "model", "key", "context", "output", "folder"))
