"""Errors with a one-sentence message for the user."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("outrider.worker")


class ModelError(ValueError):
    """The model cannot be served; the message says why."""


def lost_device() -> tuple[type[Exception], ...]:
    """The errors after which only a new process can use the device again, for an `except` clause. Imports no torch."""
    return (sys.modules["torch"].AcceleratorError,) if sys.modules.get("torch") else ()


def out_of_memory() -> tuple[type[Exception], ...]:
    """The errors of a lack of memory, on the host and on a device, for an `except` clause. Imports no torch."""
    return (MemoryError, *((sys.modules["torch"].OutOfMemoryError,) if sys.modules.get("torch") else ()))


@contextmanager
def loading(what: str, *known: type[Exception]) -> Iterator[None]:
    """Turns whatever the files of `what` ("The model at 'x'") make a library raise into one ModelError.

    `known` errors pass, because they are sentences already, and so do those after which only a new process can go on.
    """
    try:
        yield
    except out_of_memory():
        raise ModelError(f"{what} does not fit into the memory; name a smaller one, or download it again.") from None
    except Exception as error:  # a damaged file reaches every line of the code that reads it
        if isinstance(error, (ModelError, *known, *lost_device())):
            raise
        log.debug("%s does not load", what, exc_info=True)
        raise does_not_load(what, error) from None


def does_not_load(what: str, error: Exception) -> ModelError:
    """The error to raise for what a library says about a model's files."""
    reason = f"{type(error).__name__}: {first_sentence(error)}".rstrip(".: ")
    return ModelError(f"{what} does not load ({reason}); download it again, or name another one.")


def first_sentence(error: Exception) -> str:
    """The first line of an error's message that is not blank, with at most 300 characters."""
    return " ".join(str(error).strip().split("\n")[0].split())[:300]
