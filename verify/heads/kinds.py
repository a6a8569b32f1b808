"""Which checkpoints are draft heads, by their config.json. Imports no torch: draft models do not need it."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from outrider.verify.checkpoint import locate, read_json
from outrider.verify.errors import loading
from outrider.verify.hub import CONFIG, check_reachable

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
# Block heads: in the layout of speculators by name; in that of dflash by the class that computes them.
BLOCKS, CLASSES = ("dflash", "dflash2", "dspark"), ("DFlashDraftModel", "DFlash2DraftModel")


class Kind(Enum):
    ASSISTANT = auto()
    BLOCK = auto()
    EAGLE = auto()
    EAGLE3 = auto()
    MEDUSA = auto()
    ONE_LAYER = auto()  # an EAGLE head without a name, or a small model: its weights say which


def find_head(path: str, revision: str) -> tuple[Kind, dict[str, Any]] | None:
    """The kind of head at `path` and its configuration; None for a model. Raises ModelError."""
    location = locate(path, revision)
    if location.gguf is not None:
        return None
    check_reachable(location.source, None, revision)
    with loading(f"The draft model at {path!r}"):
        config = read_json(location.source, CONFIG, revision)
        config = {**config, **(config.get("transformer_layer_config") or {})}  # the layout of the library speculators
        kind = kind_of(config)
    return None if kind is None else (kind, config)


def kind_of(config: Mapping[str, Any]) -> Kind | None:
    classes = config.get("architectures") or ()
    names = " ".join(classes).lower()
    if "medusa_num_heads" in config:
        return Kind.MEDUSA
    if config.get("model_type") in ASSISTANTS:
        return Kind.ASSISTANT
    if config.get("speculators_model_type") in BLOCKS or any(name in CLASSES for name in classes) or "dflash_config" in config:
        return Kind.BLOCK
    if "eagle3" in names or "draft_vocab_size" in config:
        return Kind.EAGLE3
    if "eagle" in names:
        return Kind.EAGLE
    return Kind.ONE_LAYER if config.get("num_hidden_layers") == 1 else None
