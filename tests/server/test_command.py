"""Settings as flags: their help, and the shell's completion."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner

from outrider.server.command import EXTRA_FLAGS, SettingsCommand

app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=EXTRA_FLAGS)
def show(context: typer.Context, port: int = 0) -> None:
    """Show the flags."""
    print(port, context.args)


COMMAND: Any = typer.main.get_command(app)


def completions(arguments: list[str], incomplete: str) -> list[str]:
    context = COMMAND.make_context("show", arguments, resilient_parsing=True)
    return [item.value for item in COMMAND.shell_complete(context, incomplete)]


def test_settings_are_passed_as_arguments() -> None:
    result = CliRunner().invoke(app, ["--port", "3", "--server.port", "4"])
    assert result.output == "3 ['--server.port', '4']\n"


def test_the_shell_completes_settings() -> None:
    assert completions([], "--po") == ["--port"]
    assert completions([], "--server.po") == ["--server.port"]
    assert "--speculation.trigram.table" in completions([], "--speculation.t")


def test_the_shell_completes_choices() -> None:
    context = COMMAND.make_context("show", [], resilient_parsing=True)
    dtype = next(parameter for parameter in COMMAND.get_params(context) if "--model.dtype" in parameter.opts)
    assert [item.value for item in dtype.shell_complete(context, "b")] == ["bfloat16"]


def test_help_lists_options_and_settings() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for flag in ("--port ", "--server.port ", "--speculation.retrieval.datastores ", "--tracing.endpoint "):
        assert flag in result.output
