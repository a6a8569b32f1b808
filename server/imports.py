"""Makes the start of both processes faster and smaller."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def hide_torch() -> None:
    """Makes torch look uninstalled to this process, so that transformers loads only its tokenizers.

    That saves the front end, and the worker of a model that llama.cpp computes, seconds and hundreds of megabytes. Call it
    before the first import of transformers. Has no effect if torch is already imported.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: importing this name now fails
    logging.getLogger("transformers").addFilter(lambda record: not str(record.msg).startswith("PyTorch was not found"))


@contextmanager
def frozen() -> Iterator[None]:
    """Disables the garbage collector for what is inside, and excludes its objects from later collections.

    Imports and vocabularies are millions of permanent objects. Scanning them takes a fifth of the start-up time, and would
    later pause all streams.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
