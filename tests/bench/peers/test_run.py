"""The run's arguments, and what it says about peers that are not installed."""

from __future__ import annotations

import os

import pytest

from bench.peers import answers
from bench.peers.answers import Choice
from bench.peers.llama import LlamaServer
from bench.peers.run import installed_version, make_levels, parse_bits, parse_peers, run
from bench.peers.shapes import Shapes
from bench.plan import BenchError, Plan


def test_all_peers_and_all_cores_are_the_default() -> None:
    assert parse_peers("") == list(answers.PEERS)
    assert parse_peers("llama.cpp-http,outrider") == ["outrider", "llama.cpp-http"]
    assert make_levels(None, []).threads == os.cpu_count()
    assert make_levels(None, ["--model.threads", "1"]).threads == 1


@pytest.mark.parametrize("bits", ["5", "16,", "none"])
def test_unknown_bits_are_reported(bits: str) -> None:
    with pytest.raises(BenchError, match="--bits takes some of 32, 16, 8, 4"):
        parse_bits(bits)


def test_nothing_is_measured_if_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaServer, "packages", {"no_such_module": "some-package"})
    choice = Choice(Plan(["none"], ["x"], [0.0], 1, 1), [16], ["llama.cpp-http"])
    shapes = Shapes([], [16], ["llama.cpp-http"], ["none"], None, 1, 1)
    with pytest.raises(BenchError, match="pip install some-package"):
        run(make_levels(None, []), choice, shapes, None, None)


def test_the_version_of_a_missing_package_is_none() -> None:
    assert installed_version("no-such-package") is None
    assert installed_version("pytest") is not None
