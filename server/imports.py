"""Makes the start of both processes faster and smaller."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def hide_torch() -> None:
    """Makes torch look uninstalled to this process, so that transformers loads only its tokenizers.

    That saves the front end, and the worker of a model that llama.cpp computes, seconds and hundreds of megabytes. Call it
    before the first import of transformers. Has no effect if torch is already imported.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: importing this name now fails
    logging.getLogger("transformers").addFilter(lambda record: not str(record.msg).startswith("PyTorch was not found"))


def keep_compiled(folder: Path | None) -> None:
    """Keeps the kernels that torch and Triton compile in a folder, unless the environment names another.

    The default is the temporary folder, which containers lose. Call it before the first import of torch.
    """
    if folder is None:
        return
    with suppress(OSError):  # where the folder cannot be written, they keep their default
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))


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
