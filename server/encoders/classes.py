"""The classes that an encoder's folder names, before any of them is imported.

sentence-transformers imports the class of each module by the name in a configuration file, from a local folder also without
`trust_remote_code`. Promises that every file which it reads such names from is looked at, wherever a path leads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from outrider.server.encoders.kind import MODEL, MODULES, read

# Classes of the installed package, which import nothing that a folder holds.
TRUSTED = "sentence_transformers."
# A module that chooses between modules, the name of its file in earlier versions, and a module with a tokenizer of its own.
ROUTERS, WORDS = ("router_config.json", MODEL), "wordembedding_config.json"


def check_classes(path: str, revision: str) -> str:
    """The revision whose files were looked at. Raises ValueError if one names a class of another package or of the folder."""
    folder = Path(path).expanduser()
    if not folder.exists():
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
