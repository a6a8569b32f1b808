"""Drafters of other packages: the example of docs/drafters.md, installed by pip, and chosen by name over HTTP."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.servers import Served, serving

pytestmark = pytest.mark.slow  # it is installed, and a server starts
PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server in whose environment the example is installed."""
    folder = tmp_path_factory.mktemp("again")
    (code,) = (block for block in blocks("python") if "class Again" in block)
    (project,) = blocks("toml")
    (folder / "again.py").write_text(code)
    (folder / "pyproject.toml").write_text(project)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(folder / "installed"), str(folder)], check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])]))
        with serving("--model.dtype", "float32", "--drafter", "again", "--speculation.max_nodes", "8") as running:
            yield running


def answer(server: Served, **speculation: object) -> httpx.Response:
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    return server.http.post("/v1/completions", json=body | {"speculation": speculation | {"report": True}})


def test_its_name_chooses_it_and_no_answer_changes(server: Served) -> None:
    drafted, default, plain = (answer(server, **chosen).json() for chosen in ({"drafter": "again"}, {}, {"drafter": "none"}))
    assert drafted["choices"][0]["text"] == default["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["speculation"]["accepted_tokens"].keys() == {"other"}
    assert drafted["speculation"]["steps"] < plain["speculation"]["steps"]
    assert default["speculation"]["steps"] < plain["speculation"]["steps"]


def test_another_name_is_refused_with_all_names(server: Served) -> None:
    refused = answer(server, drafter="agian")
    assert refused.status_code == 400
    assert "'again'" in refused.text and "'fusion'" in refused.text
