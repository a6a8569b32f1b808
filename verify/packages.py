"""Packages that only some models need. Says how to install them where they are missing."""

from importlib import import_module
from importlib.util import find_spec
from threading import Lock

from outrider.verify.errors import ModelError

TORCH, TRANSFORMERS = "torch", "transformers"
LOCK = Lock()  # two threads that import transformers at once fail


def require(what: str, *packages: str) -> None:
    """Imports packages without which `what` ("A draft head") does not work. Raises ModelError if one is missing."""
    with LOCK:
        for package in packages:
            try:
                import_module(package)
            except ModuleNotFoundError as error:
                if error.name != package:
                    raise
                raise ModelError(f"{what} needs {package}; install it with pip install 'outrider[torch]'.") from None


def has_torch() -> bool:
    """Whether PyTorch is installed. Does not import it."""
    return find_spec(TORCH) is not None
