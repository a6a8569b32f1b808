"""Keeps torch out of the front end, which needs transformers only for its tokenizers."""

from __future__ import annotations

import logging
import sys


def hide_torch() -> None:
    """Makes torch look uninstalled to this process, so that transformers loads tokenizers alone.

    That saves seconds of start-up and hundreds of megabytes. Call it before the first import of transformers. Has no effect if
    torch is already imported.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's own way to make an import fail
    logging.getLogger("transformers").addFilter(lambda record: not str(record.msg).startswith("PyTorch was not found"))
