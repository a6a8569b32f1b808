"""The commands: errors are one sentence and exit code 2; help is quick; settings are printed; tables are built."""

from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from outrider.server import cli
from outrider.server.cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "99999"], "'server.port' is invalid"),
        (["serve", "--prot", "8000"], "is not a flag"),
        (["serve", "./model.gguf"], "if it is a model, give it as --model ./model.gguf"),
        (["verify-lossless", "--model", "outrider-embedded", "--drafter", "pearl"], "needs a draft model"),
        (["serve", "--speculation.drafer", "none"], "no setting 'speculation.drafer'; did you mean speculation.drafter?"),
        (["config", "--prot", "8000"], "is not a flag; did you mean --port?"),
        (["serve", "--drafter", "magic"], "'speculation.drafter' is invalid"),
        (["serve", "--config", "/no/such.yaml"], "cannot be read"),
        (["datastore", "build", "/no/such/text", "--out", "/tmp/x"], "no file or folder"),
        (["datastore", "build", "--kind", "magic", "x", "--out", "/tmp/x"], "no datastore kind"),
        (["datastore", "watch", "/no/such/tree", "--out", "/tmp/x"], "no directory"),
        (["datastore", "watch", ".", "--out", "/tmp/x", "--tokenizer", "/no/such/model"], "/no/such/model"),
        (["datastore", "watch", ".", "--out", "docs", "--once"], "was not made by `outrider datastore watch`"),
        (["bench", "decode", "--drafter", "magic"], "no drafter magic"),
        (["bench", "decode", "--prompts", "/no/such.jsonl"], "Cannot read prompts"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@lru_cache
def complete_application() -> typer.Typer:
    """The application with the commands of all entry points."""
    cli.add_plugins(app)
    return app


def run(*arguments: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(complete_application(), arguments)


def test_the_command_without_arguments_prints_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "URL", "http://127.0.0.1:1")
    assert "Usage:" in run().output
    assert run().stdout.endswith(
        "; start one with `outrider serve`, or chat with a model of its own: `outrider chat --model MODEL`.\n"
    )
    assert "Usage:" in run("datastore").output


def test_config_prints_the_effective_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("auth: {keys: {alice: sk-alices-key}}\nlogging: {level: debug}\n")
    monkeypatch.setenv("OUTRIDER_SESSIONS__CAPACITY", "2")
    arguments = ("config", "--config", str(tmp_path / "c.yaml"), "--port", "9", "--model", "./m", "--limits.max_tokens", "3")
    result = run(*arguments)
    assert result.exit_code == 0
    shown = yaml.safe_load(result.output)
    assert (shown["server"]["port"], shown["model"]["path"], shown["limits"]["max_tokens"]) == (9, "./m", 3)
    assert (shown["sessions"]["capacity"], shown["logging"]["level"]) == (2, "debug")
    for line in ("port: 9  # flag", "path: ./m  # flag", "capacity: 2  # environment", "level: debug  # file"):
        assert f"  {line}\n" in result.output
    assert "sk-alices-key" not in result.output


def test_a_report_has_the_machine_and_what_is_set_but_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_AUTH__KEYS", '{"alice": "secret-secret"}')
    flags = ["--model.path", "/home/alice/models/plans.gguf", "--server.port", "9000", "--model.quantize", "int8"]
    printed = CliRunner().invoke(app, ["version", "--report", *flags]).stdout
    assert f"- outrider: {version('outrider')}" in printed and "- CPU: " in printed and "torch" in printed
    assert "- model: plans.gguf" in printed
    changed = yaml.safe_load(printed.partition("```yaml\n")[2].partition("```")[0])
    assert changed == {"server.port": 9000, "auth.keys": "...", "model.path": "...", "model.quantize": "int8"}
    assert "alice" not in printed and "secret" not in printed
    assert CliRunner().invoke(app, ["version"]).stdout == f"outrider {version('outrider')}\n"
