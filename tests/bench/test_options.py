"""User errors end a command with one sentence; bugs keep their traceback."""

from __future__ import annotations

import pytest
import typer

from bench.options import errors_as_sentences
from bench.plan import BenchError


def test_a_user_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stopped, errors_as_sentences():
        raise BenchError("Give another file.")
    assert stopped.value.exit_code == 2
    assert capsys.readouterr().err == "outrider: Give another file.\n"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_sentences():
        raise ZeroDivisionError
