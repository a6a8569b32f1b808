"""The package llama-cpp-python, loaded once, with its messages in our log. It is optional."""

import logging
from collections import deque
from functools import cache
from importlib.util import find_spec
from typing import Any

from outrider.verify.errors import ModelError

log = logging.getLogger("outrider.worker")

PACKAGE = "llama-cpp-python"
# The last errors of the library, which name the cause of a failure.
ERRORS: deque[str] = deque(maxlen=8)
ERROR_LEVEL = 4


def is_installed() -> bool:
    return find_spec("llama_cpp") is not None


@cache
def library() -> Any:
    """The package's module. Raises ModelError if it is not installed."""
    if not is_installed():
        raise ModelError(f"model.backend is llama.cpp, which needs {PACKAGE}; install it with pip install {PACKAGE}.")
    from llama_cpp import llama_cpp

    @llama_cpp.llama_log_callback
    def log_message(level: int, text: bytes, _: object) -> None:
        line = text.decode(errors="replace").strip()
        log.debug("llama.cpp: %s", line)
        if level == ERROR_LEVEL:
            ERRORS.append(line)

    llama_cpp.outrider_log = log_message  # the library keeps only its address
    llama_cpp.llama_log_set(log_message, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def last_error() -> str:
    """The library's message for its last failure, as the rest of a sentence."""
    return ERRORS[0].rpartition(": ")[2].rstrip(".") if ERRORS else "it names no cause"
