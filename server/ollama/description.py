"""What Ollama's API tells of a model: its names, its files, what it is able to, and its memory."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from outrider.server.chat.reasoning_parser import detect_reasoning
from outrider.server.encoders.kind import MODEL, Kind, read
from outrider.server.engine.messages import Ready
from outrider.server.ollama.schema import CENTURY_SECONDS
from outrider.server.openai.models import ModelEndpoint
from outrider.server.settings.models import Model, tagged
from outrider.verify.checkpoint import stored_bytes
from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.parts import parts_of

QUANTIZATION = re.compile(r"(?:^|[-._])(I?Q\d\w*|MXFP4|BF16|F16|F32)(?:$|[-._])", re.IGNORECASE)
# Ollama's words for the capabilities of a model's card.
CAPABILITIES = {
    "chat": "completion",
    "tools": "tools",
    "reasoning": "thinking",
    "vision": "vision",
    "fill_in": "insert",
    "embeddings": "embedding",
}


@dataclass(frozen=True)
class Files:
    """What a model's files say. Empty if they are not on this machine."""

    format: str = ""
    family: str = ""
    parameters: int = 0
    context_tokens: int = 0
    quantization: str = ""
    template: str = ""
    modified: float = 0.0  # seconds since 1970


@dataclass(frozen=True)
class Description:
    name: str
    model: Model
    card: Mapping[str, Any]  # as /v1/models has it; without capabilities while they are not known
    size_bytes: int | None  # of its files
    is_loaded: bool
    info: Ready | None = None  # of its worker
    kind: Kind | None = None  # of an encoder
    idle_seconds: float = math.inf  # after which it is unloaded; from now on

    def listed(self) -> dict[str, Any]:
        """Its entry in /api/tags. Reads files."""
        files = files_of(self.model.path, self.model.revision)
        state = f"{self.model.path} {self.size_bytes} {files.modified}"
        return {
            "name": tagged(self.name),
            "model": tagged(self.name),
            "modified_at": datetime.fromtimestamp(files.modified, UTC).isoformat(),
            "size": self.size_bytes or 0,
            "digest": hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest(),
            "details": details(files),
        }

    def running(self) -> dict[str, Any]:
        """Its entry in /api/ps. Reads files."""
        memory = self.info and self.info.memory
        used = memory.weights + (memory.rest or 0) if memory else self.size_bytes or 0
        on_gpu = self.info is not None and not self.info.device.startswith("cpu")
        left = timedelta(seconds=min(self.idle_seconds, CENTURY_SECONDS))
        listed = self.listed()
        return {name: listed[name] for name in ("name", "model", "digest", "details")} | {
            "size": used,
            "size_vram": used if on_gpu else 0,
            "expires_at": (datetime.now(UTC) + left).isoformat(),
            "context_length": self.info.context_tokens if self.info else 0,
        }

    def shown(self) -> dict[str, Any]:
        """The answer of /api/show. Reads files."""
        files = files_of(self.model.path, self.model.revision)
        context = self.info.context_tokens if self.info else files.context_tokens
        family = files.family or "unknown"
        defaults = self.card.get("default_sampling_params") or {}
        return {
            "modelfile": f"FROM {self.name}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "template": files.template,
            "details": details(files),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": files.parameters or None,
                f"{family}.context_length": context or None,
            },
            "capabilities": self._capabilities(files),
            "modified_at": self.listed()["modified_at"],
        }

    def _capabilities(self, files: Files) -> list[str]:
        """Those of the card; of a model that is not loaded, those that its chat template speaks of."""
        guessed = {"tools": "tools" in files.template, "reasoning": detect_reasoning(files.template) is not None}
        known = self.card.get("capabilities") or [self.kind, *(name for name, has in guessed.items() if has)]
        found = [CAPABILITIES[each] for each in known if each in CAPABILITIES]
        return list(dict.fromkeys(found if self.kind else ["completion", *found]))


@dataclass(frozen=True)
class ServedModel:
    """The only model of a server, and its adapters. Implements `outrider.server.ollama.routes.Models`."""

    model: Model
    endpoint: ModelEndpoint

    def describe_all(self) -> list[Description]:
        return [self.describe(name) for name in (self.model.served_name, *self.model.adapters)]

    def describe(self, name: str) -> Description:
        card, info = self.endpoint.retrieve(name), self.endpoint.info()
        shown = self.model.adapter(name) or self.model.served_name
        return Description(shown, self.model, card, stored_bytes(self.model.path), info is not None, info)


def details(files: Files) -> dict[str, Any]:
    size = f"{files.parameters / 1e9:.1f}B" if files.parameters >= 1e9 else f"{files.parameters / 1e6:.2f}M"
    return {
        "parent_model": "",
        "format": files.format,
        "family": files.family,
        "families": [files.family] if files.family else [],
        "parameter_size": size if files.parameters else "",
        "quantization_level": files.quantization,
    }


def files_of(path: str, revision: str) -> Files:
    """What the files of a model say, without asking the hub."""
    located = Path(path).expanduser()
    try:
        modified = located.stat().st_mtime
    except (OSError, ValueError):
        modified = 0.0
    return read_files(path, revision, modified)


@lru_cache(64)
def read_files(path: str, revision: str, modified: float) -> Files:
    """`files_of` a model that was modified at this time."""
    located = Path(path).expanduser()
    if located.is_file():
        quantization = found[1].upper() if (found := QUANTIZATION.search(located.stem)) else ""
        try:
            metadata, *further = [read_metadata(located.with_name(name)) for name in parts_of(located.name)]
        except ModelError:
            return Files("gguf", quantization=quantization, modified=modified)
        entries, family = metadata.entries, str(metadata.entries.get("general.architecture", ""))
        return Files(
            "gguf",
            family,
            parameters=sum(prod(tensor.shape) for each in (metadata, *further) for tensor in each.tensors.values()),
            context_tokens=int(entries.get(f"{family}.context_length", 0)),
            quantization=quantization,
            template=str(entries.get("tokenizer.chat_template", "")),
            modified=modified,
        )
    stored = read(path, revision, MODEL, download=False)
    config = stored if isinstance(stored, Mapping) else {}
    text = config.get("text_config")
    context = (text if isinstance(text, Mapping) else config).get("max_position_embeddings")
    return Files(
        "safetensors" if config else "",
        str(config.get("model_type") or ""),
        context_tokens=context if isinstance(context, int) else 0,
        modified=modified,
    )
