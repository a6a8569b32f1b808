"""`outrider` whose worker replays recorded answers."""

from __future__ import annotations

from outrider.server import cli
from outrider.server.engine.worker_process import WorkerProcess

if __name__ == "__main__":
    WorkerProcess.module = "tests.agents.worker"
    cli.main()
