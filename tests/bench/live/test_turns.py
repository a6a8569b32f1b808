"""Contenders take turns; missing packages are named with the command that installs them."""

from __future__ import annotations

import pytest

from bench.live.turns import Answer, Contender, Peer, contenders, install_command, installed_version, parse_peers, take_turns
from bench.plan import BenchError

OURS, PLAIN = Contender("outrider", "none"), Contender("llama.cpp", "plain")


class Echo(Peer[int]):
    """Answers with the item, once or twice."""

    name, methods = "echo", ("plain", "twice")

    def answer(self, method: str, item: int) -> Answer:
        return Answer(item * (2 if method == "twice" else 1), 0.5)


def test_contenders_take_turns_item_by_item() -> None:
    calls: list[str] = []
    advanced: list[int] = []

    def run(name: str, item: int) -> Answer:
        calls.append(f"{name}{item}")
        return Answer(item, 1.0)

    found = take_turns(
        {OURS: lambda item: run("a", item), PLAIN: lambda item: run("b", item)}, [1, 2, 3], 9, lambda: advanced.append(1)
    )
    assert calls == ["a9", "b9", "a1", "b1", "b2", "a2", "a3", "b3"]
    assert len(advanced) == 4
    assert [answer.tokens for answer in found[PLAIN]] == [1, 2, 3]


def test_every_method_of_a_peer_is_a_contender() -> None:
    found = take_turns(contenders([Echo()]), [3], 1, lambda: None)
    assert {contender.method: [answer.tokens for answer in answers] for contender, answers in found.items()} == {
        "plain": [3],
        "twice": [6],
    }


def test_peers_are_chosen_by_name() -> None:
    assert parse_peers("llama.cpp,outrider", ["outrider", "llama.cpp"]) == ["outrider", "llama.cpp"]
    assert parse_peers("", ["outrider"]) == []
    with pytest.raises(BenchError, match="no peer ollama"):
        parse_peers("ollama", ["outrider"])


def test_a_requirement_of_several_modules_is_installed_once() -> None:
    packages = {"json": "json", "no_such_module": "'a[b]'", "no_such_other": "'a[b]'", "no_third": "c"}
    assert install_command(packages) == "pip install 'a[b]' c"
    assert install_command({"json": "json"}) is None


def test_the_version_of_a_missing_package_is_none() -> None:
    assert installed_version("no-such-package") is None
    assert installed_version("pytest") is not None
