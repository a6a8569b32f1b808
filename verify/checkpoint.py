"""Finds a model's files, and the packages that their format needs. Knows nothing about torch."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import count_layers
from outrider.verify.gguf.parts import parts_of
from outrider.verify.hub import CONFIG, here

DEFAULT_REVISION = "main"
GGUF = ".gguf"
# As the path of a draft model, this names the multi-token prediction layer in the target's own checkpoint.
MTP = "mtp"
# Weights below this size are those of a small model.
SMALL_MODEL_BYTES = 64_000_000
# The files that name a checkpoint's tensors: the first one lists those of several files. safetensors has the same bound.
INDEX, WEIGHTS, MAX_HEADER_BYTES = "model.safetensors.index.json", "model.safetensors", 100 << 20
# The weights of a checkpoint are in files of these kinds; the first kind that a folder has counts.
FORMATS = ("*.safetensors", "*.bin")
# How configurations name the number of layers, and their part about text.
LAYER_COUNTS, TEXT_CONFIGS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), ("text_config", "llm_config")
# The key of an object that is an infinite number.
FLOAT = "__float__"
# Maps each quantization_config.quant_method that transformers reads to the packages it needs: what pip installs, by the name
# that Python imports.
REQUIRED: dict[str, dict[str, str]] = {
    "aqlm": {"aqlm": "aqlm"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel", "accelerate": "accelerate"},
    "bitnet": {"accelerate": "accelerate"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes", "accelerate": "accelerate"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "fbgemm_fp8": {"accelerate": "accelerate"},
    "fp8": {"accelerate": "accelerate"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "hqq": {"hqq": "hqq"},
    "mxfp4": {},
    "mxfp8": {"accelerate": "accelerate"},
    "quanto": {"optimum": "optimum-quanto"},
    "quark": {"quark": "amd-quark"},
    "torchao": {"torchao": "torchao"},
}
QUANTIZATION = "quantization_config"
# ModelOpt's own file beside the configuration, which may lack the same.
MODELOPT = "hf_quant_config.json"
# Types of models whose answers about pictures were compared with transformers' own.
READERS = frozenset(
    {"gemma3", "gemma4", "idefics3", "internvl", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"}
)


@dataclass(frozen=True)
class Location:
    """The folder or hub id that transformers loads from, and in it, for some models, a GGUF file."""

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
    if not path.strip() or "://" in path:
        raise ModelError(f"{path!r} names no model; give a folder, a GGUF file, or a hub id such as Qwen/Qwen3-8B.")
    if path.endswith(GGUF):
        folder, _, name = path.rpartition("/")
        if Path(path).is_file():
            return Location(folder or ".", name)
        owner, repository, *rest = [*path.split("/"), ""]
        if len(rest) > 1 and owner and not Path(folder).exists() and owner[0] not in ".~":
            return Location(f"{owner}/{repository}", "/".join(rest[:-1]))  # a file of a hub id, perhaps in a folder of it
        raise ModelError(f"There is no file {path!r}; give a GGUF file, or a hub id and the name of a file in it.")
    folder_path = Path(path)
    if folder_path.is_dir():
        if revision != DEFAULT_REVISION:
            raise ModelError(f"The folder {path!r} has no revision {revision!r}; set a revision for a hub id only.")
        if not (folder_path / "config.json").exists() and not (folder_path / "tokenizer.json").exists():
            files = sorted(file.name for file in folder_path.glob(f"*{GGUF}"))
            hint = f"; give one of its files, such as {path.rstrip('/')}/{files[0]}" if files else ""
            raise ModelError(f"The folder {path!r} holds no model: it has neither config.json nor tokenizer.json{hint}.")
    elif folder_path.is_file():
        raise ModelError(f"{path!r} is neither a folder nor a GGUF file; give the folder of a model's files.")
    elif folder_path.exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"There is no folder {path!r}; give a model's folder, or a hub id such as Qwen/Qwen3-8B.")
    return Location(path)


def quantization_settings(source: str, revision: str) -> dict[str, Any]:
    """How a checkpoint's weights are quantised, by its files on this machine; empty if they are not. Raises ValueError."""
    whole = read_json(source, CONFIG, revision)
    parts = [whole, *(each for name in TEXT_CONFIGS if isinstance(each := whole.get(name), dict))]
    found = next((each[QUANTIZATION] for each in parts if each.get(QUANTIZATION)), None)
    if found is None:
        found = read_json(source, MODELOPT, revision)
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "modelopt"))
    return {**found, "quant_method": "modelopt" if method.startswith("modelopt") else method} if found else {}


def check_format(path: str, settings: Mapping[str, Any]) -> None:
    """Raises ModelError if transformers does not read a format, or if a package is missing that it needs."""
    method = settings.get("quant_method")
    if method is None:
        return
    if method not in REQUIRED:
        raise ModelError(
            f"The weights of {path!r} are in the format {method!r}, which is not read here; serve a GGUF file of the model, or"
            " another checkpoint."
        )
    missing = [package for module, package in REQUIRED[method].items() if find_spec(module) is None]
    if missing:
        raise ModelError(
            f"The weights of {path!r} are in the format {method}, which needs {' and '.join(missing)};"
            f" install with pip install {' '.join(missing)}."
        )


def stored_bytes(path: str) -> int | None:
    """The bytes of a local model's files of weights; None for a hub id."""
    located = Path(path)
    if located.is_dir():
        return next((size for kind in FORMATS if (size := sum(file.stat().st_size for file in located.glob(kind)))), 0)
    parts = [located.with_name(name) for name in parts_of(located.name)] if located.is_file() else []
    return sum(file.stat().st_size for file in parts if file.is_file()) if parts else None


def check_layer_count(path: str, revision: str = DEFAULT_REVISION) -> None:
    """Raises ModelError if the configuration has more layers than the tensors' names: building them might not end.

    Looks at the files that are on this machine; those of a hub id are there from the second start on. A GGUF file with this
    fault is refused by whatever reads it.
    """
    location = locate(path, revision)
    if location.gguf is not None:
        return
    config, names = read_json(location.source, CONFIG, revision), stored_names(location.source, revision)
    parts = [config, *(config.get(name) for name in TEXT_CONFIGS)]
    declared = next((part[name] for part in parts if isinstance(part, dict) for name in LAYER_COUNTS if name in part), None)
    stored = count_layers(names)
    if names and isinstance(declared, int) and declared > stored:
        raise ModelError(
            f"The model at {path!r} says that it has {declared} layers, but its tensors are those of {stored};"
            " download it again, or name another one."
        )


def stored_names(source: str, revision: str) -> list[str]:
    """The names of a checkpoint's tensors; empty if its files are not here. Raises ValueError and OSError."""
    if index := read_json(source, INDEX, revision):
        return [*index["weight_map"]]
    found = here(source, WEIGHTS, revision)
    if found is None:
        return []
    with open(found, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return [*json.loads(file.read(min(size, MAX_HEADER_BYTES)))]


def read_json(source: str, name: str, revision: str) -> dict[str, Any]:
    """A JSON file of a checkpoint; empty if it is not here. Raises ValueError and OSError."""
    found = here(source, name, revision)
    try:
        content = {} if found is None else json.loads(found.read_bytes(), object_hook=decode_number)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not a JSON object")
    return content


def decode_number(content: dict[str, Any]) -> Any:
    """A JSON object, or the number that transformers writes as one, such as {"__float__": "Infinity"}."""
    return float(content[FLOAT]) if content.keys() == {FLOAT} else content
