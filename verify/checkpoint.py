"""Where a model's files are, and which packages their format needs. Knows nothing about torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import read_metadata

DEFAULT_REVISION = "main"
GGUF = ".gguf"
# As the path of a draft model, this names the multi-token prediction layer in the target's own checkpoint.
MTP = "mtp"
# Weights below this size are those of a small model.
SMALL_MODEL_BYTES = 64_000_000
# Maps each quantization_config.quant_method to the packages it needs: what pip installs, by the name that Python imports.
REQUIRED: dict[str, dict[str, str]] = {
    "awq": {"gptqmodel": "gptqmodel", "accelerate": "accelerate"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "fp8": {"accelerate": "accelerate"},
    "gguf": {"gguf": "gguf", "accelerate": "accelerate"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "torchao": {"torchao": "torchao"},
}


@dataclass(frozen=True)
class Location:
    """What transformers loads from: a folder or a hub id, and in it, for some models, a GGUF file."""

    source: str
    gguf: str | None = None

    @property
    def arguments(self) -> dict[str, str]:
        """Further arguments of `from_pretrained`."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def locate(path: str, revision: str = DEFAULT_REVISION) -> Location:
    """The location that a model's path names.

    Raises ModelError for a path that transformers would mistake for a hub id, and for a revision of a folder.
    """
    if path.endswith(GGUF):
        folder, _, name = path.rpartition("/")
        if Path(path).is_file() or (folder.count("/") == 1 and not Path(folder).exists() and folder[0] not in "./~"):
            check_packages(path, "gguf")
            return Location(folder or ".", name)
        raise ModelError(f"There is no file {path!r}; give a GGUF file, or a hub id and the name of a file in it.")
    folder_path = Path(path)
    if folder_path.is_dir():
        if revision != DEFAULT_REVISION:
            raise ModelError(f"The folder {path!r} has no revision {revision!r}; set a revision for a hub id only.")
        if not (folder_path / "config.json").exists() and not (folder_path / "tokenizer.json").exists():
            files = sorted(file.name for file in folder_path.glob(f"*{GGUF}"))
            hint = f"; give one of its files, such as {path.rstrip('/')}/{files[0]}" if files else ""
            raise ModelError(f"The folder {path!r} holds no model: it has neither config.json nor tokenizer.json{hint}.")
    elif folder_path.exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"There is no folder {path!r}; give a model's folder, or a hub id such as Qwen/Qwen3-8B.")
    return Location(path)


def quantization_method(config: Any) -> str | None:
    """How a checkpoint's weights are quantised, by its configuration; None if they are not."""
    quantization = getattr(config, "quantization_config", None)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def check_packages(path: str, method: str) -> None:
    """Raises ModelError if a package is missing that the checkpoint's format needs."""
    missing = [package for module, package in REQUIRED.get(method, {}).items() if find_spec(module) is None]
    if missing:
        raise ModelError(
            f"The weights of {path!r} are in the format {method}, which needs {' and '.join(missing)};"
            f" install with pip install {' '.join(missing)}."
        )


def gguf_bits(file: str) -> float:
    """Mean bits per weight of a GGUF file."""
    return read_metadata(file).bits_per_weight


def checkpoint_bytes(path: str) -> float:
    """The size of a local model's weight files; infinite for a hub id."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) or math.inf
