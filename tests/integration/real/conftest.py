"""The server with SmolLM2-135M-Instruct, shared by the tests of this folder: `make real` runs all, `make test` the quick ones.

In float32 answers are compared with transformers' own; test_formats.py has the other formats. The number of nodes is fixed, so
that no costs are measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.models import smollm2
from tests.servers import Served, serving

FLAGS = ("--model.dtype", "float32", "--speculation.max_nodes", "12")


@pytest.hookimpl(tryfirst=True)  # before the hook that groups tests by their modules
def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of this folder, and keeps them in one process of pytest-xdist."""
    if Path(__file__).parent in item.path.parents:
        item.add_marker(pytest.mark.real)
        item.add_marker(pytest.mark.xdist_group("real"))


@pytest.fixture(scope="session")
def file() -> str:
    """The model's file; skips the test if it is not installed."""
    try:
        return str(smollm2.locate())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real(file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a datastore that holds text of the questions."""
    from outrider.server.datastore_builder import build_suffix

    folder = tmp_path_factory.mktemp("real")
    (folder / "text.md").write_text("The capital of France is Paris. The capital of Germany is Berlin.\n")
    build_suffix([folder / "text.md"], folder / "store", file, append=False)
    stores = json.dumps([str(folder / "store")])
    with serving("--model", smollm2.NAME, *FLAGS, "--speculation.retrieval.datastores", stores) as server:
        yield server
