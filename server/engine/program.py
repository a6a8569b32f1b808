"""Programs beside the front end: new Python processes of this project, with a socket to each.

They are no multiprocessing children: the front end never imports their modules, and they do not import its main module. A
program ends by itself when its socket closes.
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref

# A program gets this process's module search path, so that both run the same code wherever it is installed. Ctrl-C and a closed
# terminal reach the whole process group; only the front end handles them.
PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from {module} import main
main(sys.argv[1])
"""


def command(module: str, argument: str) -> list[str]:
    """The command line that calls `main(argument)` of a module of this project in a new Python process."""
    return [sys.executable, "-P", "-c", PROGRAM.format(module=module), argument, *sys.path]


def environment_without_settings() -> dict[str, str]:
    """The environment without settings, which may contain API keys."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("OUTRIDER_")}


class Program:
    """A running program, and the front end's end of the socket to it."""

    def __init__(self, module: str) -> None:
        """Starts `main` of this module; returns at once. Raises OSError."""
        self._process, self.socket = start(module)
        weakref.finalize(self, end, self._process, self.socket)  # nobody else would end a program that is dropped

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal's number; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for the process to end. Blocks; call it in a thread."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Ends the process at once, if it still runs."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process, waits for its end and closes the socket."""
        end(self._process, self.socket)


def end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Kills a process, waits for its end and closes the socket to it."""
    process.kill()
    process.wait()
    connection.close()


def start(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts `main` of a module, which calls `connected` with its argument. Returns the process and the socket to it.

    Raises OSError.
    """
    end, theirs = socket.socketpair()
    try:
        with theirs:
            program = command(module, str(theirs.fileno()))
            environment = environment_without_settings()
            process = subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    except BaseException:
        end.close()
        raise
    return process, end


def connected(argument: str) -> socket.socket:
    """The program's end of the socket."""
    return socket.socket(fileno=int(argument))
