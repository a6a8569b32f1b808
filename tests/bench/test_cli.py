"""The commands are added to another application and import nothing heavy; flags change the drafters' options in bounds."""

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.cli import register
from bench.drafter_options import change_options, take_options
from bench.plan import BenchError
from outrider.drafters.options import Options

app = typer.Typer()
register(app)


def test_the_entry_point_adds_the_commands() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    assert "bench" in listed
    assert "verify-lossless" in listed and "verify-quality" in listed
    commands = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in commands for name in ("decode", "gpu", "live", "replay", "serve", "start"))


def test_nothing_heavy_is_imported_with_the_commands() -> None:
    heavy = "import bench.cli, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["verify-lossless", "--drafter", "magic"], "no drafter magic"),
        (["bench", "decode", "--temperature", "warm"], "--temperature takes numbers"),
        (["bench", "decode", "--forced", "x.jsonl", "--streams", "0"], "--streams takes whole numbers"),
        (["bench", "decode", "--model.no_such", "1"], "model.no_such"),
        (["bench", "decode", "--draft.no_such", "1"], "no option --draft.no_such"),
        (["bench", "live", "--prompts", "no-such-file"], "Cannot read questions from no-such-file"),
        (["bench", "replay", "--stream", "x", "--tokenizer", "x", "--nodes", "many"], "--nodes takes whole numbers"),
        (["bench", "start", "no-such-file"], "there is no file no-such-file"),
        (["bench", "serve", "--rate", "0"], "--rate takes numbers above 0"),
        (["bench", "serve", "--concurrency", "1.5"], "--concurrency takes whole numbers"),
    ],
)
def test_user_errors_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_flags_of_drafters_are_told_from_settings() -> None:
    flags = {"draft.steps": "4", "draft.only_if_worth": "false", "draft_model.path": "d", "speculation.max_nodes": "8"}
    settings, changes = take_options(flags)
    assert settings == {"draft_model.path": "d", "speculation.max_nodes": "8"}
    assert changes == {"draft": {"steps": "4", "only_if_worth": "false"}}


def test_options_are_changed_and_converted() -> None:
    found = change_options(Options(), {"draft": {"steps": "4", "only_if_worth": "false"}, "trigram": {"table": "my.ngram"}})
    assert (found.draft.steps, found.draft.only_if_worth, found.trigram.table) == (4, False, "my.ngram")
    assert found.draft_tree == Options().draft_tree
    assert change_options(Options(), {}) == Options()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trigram": {"order": "2"}}, "no option --trigram.order; trigram has contexts, depth, search, table"),
        ({"trigram": {"depth": "33"}}, "--trigram.depth is invalid: Input should be less than or equal to 32"),
        ({"draft": {"steps": "many"}}, "--draft.steps is invalid"),
    ],
)
def test_unknown_and_invalid_options_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        change_options(Options(), changes)
