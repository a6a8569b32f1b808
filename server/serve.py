"""Starts the worker process and the front end. Start-up failures print one sentence and return exit code 2."""

import contextlib
import gc
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

from outrider.server.encoders.kind import kind_of
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.http.tls import server_context
from outrider.server.imports import frozen, hide_torch
from outrider.server.models.catalog import find_models
from outrider.server.settings import Server, Settings, SettingsError
from outrider.server.telemetry.logs import configure
from outrider.verify.checkpoint import MTP, locate
from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.hub import check_reachable, model_file
from outrider.verify.model_names import resolve

# The kernel would hold megabytes of a stream whose client has stopped reading, so that the server noticed it too late.
UNSENT_BYTES = 1 << 16
# A server that runs accepts a connection within this time.
CHECK_SECONDS = 1.0


def run(settings: Settings, early: WorkerProcess | None = None) -> int:
    """Serves until a signal; returns the process's exit code. `early` is a worker that waits for its settings."""
    configure(settings.logging)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        check_address(settings)
        with ExitStack() as stack:
            server_context(settings.server)  # wrong files are told of before a model is loaded
            listener = stack.enter_context(listen_as_set(settings.server))
            metrics_listener = None
            if settings.metrics.port is not None:
                metrics_listener = stack.enter_context(listen(settings.metrics.host, settings.metrics.port, "--metrics.port"))
            if settings.models.paths:
                if early is not None:
                    early.close()  # each model gets its own
                return serve_several(settings, listener, metrics_listener)
            settings = named(settings)
            check_model(settings)
            worker = stack.enter_context(closing(early or WorkerProcess()))
            worker.begin(settings)
            with frozen():
                if not settings.model.trust_remote_code:  # the tokenizer's code may need torch
                    hide_torch()
                from outrider.server.front_end import serve
            return serve(settings, listener, worker, metrics_listener)
    except (SettingsError, ModelError, OSError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    finally:
        gc.unfreeze()


def serve_several(settings: Settings, listener: socket.socket, metrics_listener: socket.socket | None) -> int:
    """Serves the models of `models.paths`; returns the exit code. Raises SettingsError."""
    entries = find_models(settings)
    with frozen():
        if not settings.model.trust_remote_code:
            hide_torch()
        from outrider.server.models.app import serve
    return serve(settings, entries.values(), listener, metrics_listener)


def check_address(settings: Settings) -> None:
    """Raises SettingsError if the server would be open to the network without API keys."""
    if not (settings.auth.keys or settings.auth.open or settings.server.is_local):
        raise SettingsError(
            f"{settings.server.host} is a public address and there are no API keys; set auth.keys or auth.file, "
            "or set --auth.open true if something else controls access."
        )


def named(settings: Settings) -> Settings:
    """The settings with the paths that the models' names mean. Prints each choice that was made. Raises ModelError."""
    changed = {}
    for section in ("model", "draft_model"):
        model = getattr(settings, section)
        path, revision = model.place
        if path is not None and path != MTP:
            meant = resolve(path, revision)
            if meant.note:
                print(f"outrider: {meant.note}", file=sys.stderr)
            changed[section] = model.model_copy(update={"path": model.path.replace(path, meant.path)})
    return settings.model_copy(update=changed)


def check_model(settings: Settings) -> None:
    """Looks at the models before anything heavy is imported. Raises SettingsError if the model is known to be an encoder.

    Raises ModelError if a model is not there, is no complete GGUF file, or cannot be downloaded.
    """
    for path, revision in (settings.model.place, settings.draft_model.place):
        if path is not None and path != MTP:
            location = locate(path, revision)
            check_reachable(location.source, location.gguf, revision)
            if location.gguf is not None:
                read_metadata(str(model_file(location.source, location.gguf, revision)))
    if kind_of(settings.model.path, settings.model.revision, download=False) is not None:
        raise SettingsError(f"{settings.model.path} is an encoder and writes no text; serve it with --models.paths instead.")


def listen_as_set(settings: Server) -> AbstractContextManager[socket.socket]:
    """The listening socket of the API. Raises OSError with one sentence."""
    if settings.socket_file is not None:
        return listening_at(*settings.socket_file)
    return listen(settings.host, settings.port)


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket. Raises OSError with one sentence, which names `flag`, if the address is in use or not local."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # early clients wait instead of being refused
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(
            f"Cannot listen on {host}:{port} ({reason}); choose another {flag} or stop the process that uses it."
        ) from None
    return listener


@contextlib.contextmanager
def listening_at(path: Path, mode: int) -> Iterator[socket.socket]:
    """A listening socket whose file has `mode`, and is removed at the end. Raises OSError with one sentence.

    Replaces the file of a server that has not ended properly.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            listener.bind(str(path))
            own = os.stat(path).st_ino
            os.chmod(path, mode)  # nobody can connect before the socket listens
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"Cannot listen on the UNIX socket {path} ({reason}); choose another --host.") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == own:  # otherwise, another server's
                    os.unlink(path)


def _remove_stale(path: Path) -> None:
    """Removes a socket on which nobody listens. Raises OSError if there is something else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CHECK_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return os.unlink(path)
        except TimeoutError:  # its queue is full
            pass
    raise OSError("a running server listens there")
