"""Makes the start-up imports of both processes quicker and smaller."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def hide_torch() -> None:
    """Makes torch look uninstalled to this process, so that transformers loads tokenizers alone.

    That saves the front end seconds and hundreds of megabytes. Call it before the first import of transformers. Has no effect
    if torch is already imported.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: importing this name now fails
    logging.getLogger("transformers").addFilter(lambda record: not str(record.msg).startswith("PyTorch was not found"))


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Imports inside run without the garbage collector; what they make is excluded from every later collection.

    Imports make hundreds of thousands of objects that stay: collections among them take a fifth of the start, and later pause
    all streams.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
