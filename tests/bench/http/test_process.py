"""A server answers until it is ended, and one that ends before it is ready is an error."""

import pytest

from bench.http.process import start
from bench.plan import BenchError


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    failing = start(["json.tool"], "/health")  # does not know --port
    with pytest.raises(BenchError, match=r"json\.tool did not start: .*error: argument infile"), failing:
        pass


def test_a_server_answers_and_ends() -> None:
    with start(["uvicorn", "fastapi:FastAPI", "--factory"], "/docs") as server:
        assert server.client.get("/docs").status_code == 200
        assert any("/docs" in line for line in server.log)
    assert server.process.wait(0) is not None
