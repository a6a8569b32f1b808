"""The names under which people know models, as paths that can be loaded: addresses, `owner/name:Q4_K_M`, and Ollama's names.

Looks into the hub's cache and those of other programs first, and asks the hub only for what is in none.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF, stored_bytes
from outrider.verify.errors import ModelError
from outrider.verify.gguf.parts import parts_of
from outrider.verify.hub import CONFIG, hub_errors, reason
from outrider.verify.model_stores import NO_MODEL, stored_models, tag_of
from outrider.verify.system_memory import free_bytes

ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(hf\.co|huggingface\.co|modelscope\.cn(?:/models)?)/|(?:hf|modelscope)://")
WEB_PATH = re.compile(r"/(?:tree|blob|resolve)/[^/]+(?=/|$)|\?.*")
NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?")
# Weights of a checkpoint; a repository that has them is one, also if it has GGUF files.
WEIGHTS = (".safetensors", ".bin")
# Of several files, this type is served if it fits, as in llama.cpp and Ollama, or else the largest that fits: its weights
# may take this share of the free memory.
PREFERRED, SHARE = "Q4_K_M", 0.8
LATEST = "latest"  # Ollama's tag of a model that was named without one


@dataclass(frozen=True)
class Meant:
    """What a name means: a path in the forms of `model.path`, and a sentence about a choice that was made, if one was."""

    path: str
    note: str = ""


@dataclass(frozen=True)
class File:
    """A GGUF file that a name may mean."""

    tag: str
    path: str
    size_bytes: int


def resolve(name: str, revision: str = DEFAULT_REVISION) -> Meant:
    """What the name of a model means. A name that means nothing here stays as it is. Raises ModelError."""
    if (folder := Path(name)).exists() or name.startswith(("/", ".", "~")):
        is_model = folder.is_file() or any((folder / file).exists() for file in (CONFIG, "tokenizer.json"))
        return Meant(name) if is_model else chosen(local_files(folder.glob(f"*{GGUF}")), name, "") or Meant(name)
    short, is_modelscope = without_address(name)
    parts = NAME.fullmatch(short)
    if parts is None:
        return Meant(short)
    repository, tag = parts[1], parts[2] or ""
    found = cached(repository, tag, revision) if "/" in repository and not is_modelscope else None
    if found := found or (stored(repository, tag) if revision == DEFAULT_REVISION else None):
        return found
    if is_modelscope:
        raise ModelError(f"ModelScope's cache has no {short}; download it with: modelscope download --model {repository}")
    if "/" in repository:
        return on_hub(repository, tag, revision)
    if tag:
        raise ModelError(f"Ollama has no model {short!r} on this machine; outrider list shows those that are here.")
    return Meant(short)


def without_address(name: str) -> tuple[str, bool]:
    """The name of a repository or of a file in it, without what makes it an address, and whether it is ModelScope's."""
    found = ADDRESS.match(name)
    return (WEB_PATH.sub("", name[found.end() :]).rstrip("/"), "modelscope" in found[0]) if found else (name, False)


def local_files(paths: Iterable[Path]) -> list[File]:
    return [File(tag_of(each.name), str(each), stored_bytes(str(each)) or 0) for each in sorted(paths) if is_model(each.name)]


def is_model(file: str) -> bool:
    """Whether a file holds a model, or the first part of one."""
    return file.lower().endswith(GGUF) and not NO_MODEL.search(file.rpartition("/")[2])


def cached(repository: str, tag: str, revision: str) -> Meant | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except hub_errors():
        return None
    if not tag and any(file.suffix in WEIGHTS for file in folder.iterdir()):
        return Meant(repository)
    found = local_files(folder.rglob(f"*{GGUF}"))
    files = [File(each.tag, f"{repository}/{Path(each.path).relative_to(folder)}", each.size_bytes) for each in found]
    return chosen(files, repository, tag)


def stored(repository: str, tag: str) -> Meant | None:
    models = [each for each in stored_models() if each.repository.casefold() == repository.casefold()]
    for each in models:
        if each.path.is_dir() and not tag:
            return Meant(str(each.path))
    files = {each.name: each for each in models if each.path.is_file()}
    sizes = {name: stored_bytes(str(each.path)) or 0 for name, each in files.items()}
    found = chosen([File(each.tag, name, sizes[name]) for name, each in files.items()], repository, tag)
    return found and Meant(files[found.path].served_path(), found.note)


def on_hub(repository: str, tag: str, revision: str) -> Meant:
    """What the hub has of a repository. Raises ModelError if it does not answer or lacks the tag."""
    try:
        files = hub_files(repository, revision)
    except hub_errors() as error:
        if not tag and "offline" in type(error).__name__.casefold():
            return Meant(repository)  # a part of it may be in the cache
        raise ModelError(f"{repository}{tag and ':' + tag} cannot be downloaded: {reason(error)}") from None
    if not tag and any(name.endswith(WEIGHTS) and "/" not in name for name in files):
        return Meant(repository)
    sizes = {name: sum(files.get(part, 0) for part in parts_of(name)) for name in files if is_model(name)}
    models = [File(tag_of(name), f"{repository}/{name}", size) for name, size in sizes.items()]
    found = chosen(models, repository, tag)
    if found is None and tag:
        has = ", ".join(each.tag for each in models) or "no GGUF file"
        raise ModelError(f"{repository} has no {tag}, but {has}.")
    return found or Meant(repository)


def hub_files(repository: str, revision: str) -> dict[str, int]:
    """The sizes of the files in a repository of the hub. Raises one of `hub_errors`."""
    from huggingface_hub import HfApi

    tree = HfApi().list_repo_tree(repository, recursive=True, revision=revision)
    return {each.path: each.size for each in tree if hasattr(each, "size")}


def chosen(files: Sequence[File], what: str, tag: str) -> Meant | None:
    """The file of a tag; without one, the only file, or one that fits. None if there is none."""
    if tag:
        wanted = tag.casefold()
        found = [each for each in files if each.tag.casefold() == wanted]
        found = found or [each for each in files if wanted in each.path.rpartition("/")[2].casefold()]
        if found or wanted != LATEST:
            return Meant(found[0].path) if found else None
    if len(files) < 2:
        return Meant(files[0].path) if files else None
    room = free_bytes()
    fitting = [each for each in files if each.size_bytes <= SHARE * room]
    best = next((each for each in fitting if each.tag == PREFERRED), None)
    best = best or sorted(fitting or files, key=lambda each: each.size_bytes)[-1 if fitting else 0]
    fits = "which fits" if fitting else "the smallest, as none fits"
    note = (
        f"{what} has {', '.join(each.tag for each in files)}; this is {best.tag}, {fits} into {room / 1e9:.1f} GB of free "
        f"memory. Name another one as {next(each.path for each in files if each != best)}."
    )
    return Meant(best.path, note)
