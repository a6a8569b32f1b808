"""A worker over the tiny model."""

from collections.abc import Iterator

import pytest

from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.fakes import Rig


@pytest.fixture
def rig(tiny_runner: TorchRunner) -> Iterator[Rig]:
    made = Rig(tiny_runner)
    yield made
    made.close()
