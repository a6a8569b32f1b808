"""A server that belongs to one chat: a process that listens on a free port and ends with the chat.

Only the chat can use it: it listens on the loopback address and knows one key, which no other process can read.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from outrider.server.engine.program import command
from outrider.server.settings import Settings, load_settings
from outrider.server.settings.access import Auth
from outrider.server.terminal.client import ChatError, Client, printable

POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
PRINCIPAL = "chat"


def main(_: str) -> None:
    """The process: reads its settings from stdin, and serves until stdin is closed."""
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_chat, daemon=True).start()
    from outrider.server.serve import run

    sys.exit(run(private_settings(given["config"] and Path(given["config"]), given["flags"], given["key"])))


def private_settings(config: Path | None, flags: dict[str, Any], key: str) -> Settings:
    """These settings on a free port of the loopback address. `key` is the only key, whatever the settings say."""
    own = {"server.host": "127.0.0.1", "server.port": 0, "metrics.port": None, "server.drain_seconds": 0}
    own |= {f"server.{name}": None for name in ("tls_certificate", "tls_key", "path_prefix")}
    auth = Auth.model_validate({"keys": {PRINCIPAL: key}})
    return load_settings(config, flags | own).model_copy(update={"auth": auth})


def end_with_chat() -> None:
    """Ends this process when the chat ends, however it ends."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


class OwnServer:
    def __init__(self, config: Path | None, flags: dict[str, Any]) -> None:
        """Starts the process with these settings; returns at once."""
        self.key = secrets.token_urlsafe()
        # The server has a process group of its own, so that Ctrl-C stops an answer and not the server.
        self._process = subprocess.Popen(
            command("outrider.server.terminal.own_server", ""),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            given = {"config": config and str(config.absolute()), "flags": flags, "key": self.key}
            self._process.stdin.write(json.dumps(given) + "\n")
            self._process.stdin.flush()
        self._last_line = ""
        self._loading = True
        self._url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)  # a full pipe would block the server
        self._reader.start()

    def wait_until_ready(self) -> Client:
        """A client of the server, once the model is loaded. Raises ChatError, without a message if the server has said why."""
        while not (self._url and Client(self._url, self.key).is_ready()):
            self.check()
            time.sleep(POLL_SECONDS)
        self._loading = False
        return Client(self._url, self.key)

    def check(self) -> None:
        """Raises ChatError if the process has ended."""
        if self._process.poll() is not None:
            self._reader.join(STOP_SECONDS)
            raise ChatError("" if self._loading else f"The server of this chat has ended: {self._last_line}")

    def close(self) -> int:
        """Ends the process and waits for it; returns its exit code."""
        assert self._process.stdin is not None and self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stderr.close()
        return self._process.returncode

    def _read(self) -> None:
        """Reads the server's messages, and shows them while it loads: the progress of a download, or why it cannot start."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.match(r"outrider: serving .* at (http://\S+)/v1 ", line)
            if found:
                self._url = found[1]
            if self._loading:
                print(printable(line), end="", file=sys.stderr, flush=True)
            self._last_line = line
