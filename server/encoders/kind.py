"""Whether a model writes text or is an encoder, and which classes an encoder names, by its configuration files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from outrider.verify.hub import here, hub_errors, model_file

Kind = Literal["embeddings", "rerank"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The configuration of sentence-transformers, its list of modules, and that of transformers.
SENTENCE, MODULES, MODEL = "config_sentence_transformers.json", "modules.json", "config.json"


def kind_of(path: str, revision: str, download: bool) -> Kind | None:
    """The task of an encoder; None for any other model. Of a Hugging Face id, the files in its cache count, or with `download`
    those of the hub.
    """
    if path.endswith(".gguf"):
        return None
    sentence, modules, model = (read(path, revision, name, download) for name in (SENTENCE, MODULES, MODEL))
    if isinstance(sentence, Mapping) and sentence.get("model_type") == "CrossEncoder":
        return "rerank"
    if modules is not None or sentence is not None:
        return "embeddings"
    return kind_of_config(model) if isinstance(model, Mapping) else None


def kind_of_config(config: Mapping[str, Any]) -> Kind | None:
    """The task of a model that sentence-transformers did not save."""
    if config.get("model_type") == "model2vec":
        return "embeddings"
    listed = config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    if architecture.endswith("ForSequenceClassification"):
        return "rerank"
    return "embeddings" if architecture.endswith(("ForMaskedLM", "BertModel", "RobertaModel", "MPNetModel")) else None


def read(path: str, revision: str, name: str, download: bool) -> Any:
    """A JSON file of a model; None if it has none that can be read."""
    folder = Path(path).expanduser()
    source = str(folder) if folder.exists() else path
    try:
        file = model_file(source, name, revision) if download else here(source, name, revision)
        return None if file is None else json.loads(file.read_bytes())
    except hub_errors(RecursionError):
        return None


# Classes of the installed package, which import nothing that a folder holds.
TRUSTED = "sentence_transformers."
# A module that chooses between modules, the name of its file in earlier versions, and a module with a tokenizer of its own.
ROUTERS, WORDS = ("router_config.json", MODEL), "wordembedding_config.json"


def check_classes(path: str, revision: str) -> str:
    """The revision whose files were looked at. Raises ValueError if one names a class of another package or of the folder.

    sentence-transformers imports the class of each module by the name in a configuration file, from a local folder also without
    `trust_remote_code`. Every file which it reads such names from is looked at, wherever a path leads.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        from huggingface_hub import snapshot_download  # takes 0.2 s, which a local model need not wait for

        # The commit is loaded, and not the branch, which may have other files a moment later.
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=["*.json"]))
        revision = folder.name
    for name in named_classes(folder):
        if not (isinstance(name, str) and name.startswith(TRUSTED)):
            raise ValueError(
                f"its folder names the class {str(name)[:200]!r}, which is not part of sentence-transformers; set"
                " model.trust_remote_code if you would run this folder as a program"
            )
    return revision


def named_classes(folder: Path) -> Iterator[Any]:
    """The class names in a model's configuration files."""
    modules = read(str(folder), "", MODULES, False)
    folders: list[Path] = []
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, Mapping):
            yield module.get("type")
            folders.append(folder / str(module.get("path") or ""))
    seen: set[Path] = set()
    while folders:
        if (each := folders.pop().resolve()) in seen:
            continue
        seen.add(each)
        words = read(str(each), "", WORDS, False)
        if isinstance(words, Mapping) and "tokenizer_class" in words:
            yield words["tokenizer_class"]
        for name in ROUTERS:
            config = read(str(each), "", name, False)
            types = config.get("types") if isinstance(config, Mapping) else None
            for part, type_name in types.items() if isinstance(types, Mapping) else ():
                yield type_name
                folders.append(each / part)
