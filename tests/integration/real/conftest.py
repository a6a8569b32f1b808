"""The server with SmolLM2-135M-Instruct, shared by the tests of this folder: `make real` runs all, `make test` the quick ones.

It runs as `make serve` starts it: on the blocks of its file, with as many nodes as its measured costs allow. Only where answers
are compared with transformers' own, the weights are float32.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.models import packaged
from tests.hub import installed
from tests.servers import Served, serving


@pytest.hookimpl(tryfirst=True)  # before the hook that groups tests by their modules
def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of this folder, and keeps those of the shared server in one process of pytest-xdist."""
    if Path(__file__).parent in item.path.parents:
        item.add_marker(pytest.mark.real)
        is_shared = "real" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("real" if is_shared else f"real {item.path.stem}"))


@pytest.fixture(scope="session")
def file() -> str:
    return str(installed())


@pytest.fixture(scope="session")
def real(file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a datastore that holds text of the questions."""
    from outrider.server.datastore_builder import build_suffix

    folder = tmp_path_factory.mktemp("real")
    (folder / "text.md").write_text("The capital of France is Paris. The capital of Germany is Berlin.\n")
    build_suffix([folder / "text.md"], folder / "store", file)
    stores = json.dumps([str(folder / "store")])
    with serving("--model", packaged.SMOLLM2, "--speculation.retrieval.datastores", stores) as server:
        yield server
