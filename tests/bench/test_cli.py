"""The commands are added to another application, and import nothing heavy until they run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from bench.cli import register

app = typer.Typer()
register(app)


def test_the_entry_point_adds_the_commands() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    assert "bench" in listed
    assert "verify-lossless" in listed and "verify-quality" in listed
    commands = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in commands for name in ("decode", "gpu", "live", "replay", "serve"))


def test_nothing_heavy_is_imported_with_the_commands() -> None:
    heavy = "import bench.cli, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["verify-lossless", "--drafter", "magic"], "no drafter magic"),
        (["bench", "decode", "--temperature", "warm"], "--temperature takes numbers"),
        (["bench", "decode", "--shape", "llama-1b", "--forced", "x.jsonl"], "--forced needs --shape and --tokenizer"),
        (["bench", "decode", "--model.no_such", "1"], "model.no_such"),
        (["bench", "decode", "--draft.no_such", "1"], "no option --draft.no_such"),
        (["bench", "live", "--prompts", "no-such-file"], "Cannot read questions from no-such-file"),
        (["bench", "replay", "--stream", "x", "--tokenizer", "x", "--nodes", "many"], "--nodes takes whole numbers"),
        (["bench", "serve", "--rate", "0"], "--rate takes numbers above 0"),
        (["bench", "serve", "--concurrency", "1.5"], "--concurrency takes whole numbers"),
    ],
)
def test_user_errors_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
