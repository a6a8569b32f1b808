"""Models that other programs have downloaded: Ollama, LM Studio, llama.cpp and ModelScope. Reads their folders only."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.verify.errors import ModelError

# Further parts of a file in several parts, and the projectors of models that read images.
NO_MODEL = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|^mmproj", re.IGNORECASE)
# How a file's name tells its types, as in Qwen3-8B-UD-Q4_K_XL.gguf or qwen2.5-q8_0-00001-of-00002.gguf.
TYPES = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32))(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
OLLAMA_WEIGHTS = "application/vnd.ollama.image.model"
# Ollama's names leave these out.
REGISTRY, LIBRARY = "registry.ollama.ai", "library"
LINKS = Path("~/.cache/outrider/links")


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine by the name that people give it."""

    repository: str  # owner/name, or the name in Ollama's library
    tag: str  # what follows a colon: the types of its weights, or Ollama's tag; empty for a checkpoint
    path: Path  # a GGUF file or the folder of a checkpoint
    program: str

    @property
    def name(self) -> str:
        return f"{self.repository}:{self.tag}" if self.tag else self.repository

    def served_path(self) -> str:
        """The path to serve: for one of Ollama's files, which have no ending, a link that has one. Raises ModelError."""
        if self.path.is_dir() or self.path.suffix == ".gguf":
            return str(self.path)
        own = hashlib.sha256(str(self.path).encode()).hexdigest()[:16]  # saved sessions know all files of a model's folder
        link = LINKS.expanduser() / own / f"{self.name.replace('/', '-')}.gguf"
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(self.path)
        except OSError as error:
            raise ModelError(f"{self.name} needs a link at {link}, which cannot be made: {error.strerror}.") from None
        return str(link)


def stored_models() -> list[StoredModel]:
    """The models of all programs. A folder that cannot be read has none."""
    found: list[StoredModel] = []
    for models in (ollama(), lm_studio(), llama_cpp(), modelscope()):
        with contextlib.suppress(OSError):
            found.extend(models)
    return list({(each.name, each.path): each for each in found}.values())


def tag_of(file: str) -> str:
    """The types of a GGUF file's weights by its name, or the name without its ending."""
    found = TYPES.search(file)
    return found[1].upper() if found else Path(file).stem


def environment_folder(name: str, default: str) -> Path:
    return Path(os.environ.get(name) or default).expanduser()


def ollama() -> Iterator[StoredModel]:
    """Ollama's: a manifest per model and tag, which names a blob."""
    for root in (environment_folder("OLLAMA_MODELS", "~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")):
        for manifest in sorted((root / "manifests").glob("*/*/*/*")):
            host, owner, name, tag = manifest.relative_to(root / "manifests").parts
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # what is not as expected is no model
                layers = json.loads(manifest.read_bytes())["layers"]
                digests = [layer["digest"] for layer in layers if layer["mediaType"] == OLLAMA_WEIGHTS]
                blob = root / "blobs" / digests[0].replace(":", "-")
                if blob.is_file():
                    repository = name if (host, owner) == (REGISTRY, LIBRARY) else f"{owner}/{name}"
                    yield StoredModel(repository, tag, blob, "Ollama")


def lm_studio() -> Iterator[StoredModel]:
    """LM Studio's: a folder per owner and repository."""
    home = Path("~/.lmstudio").expanduser()
    roots = [home / "models", Path("~/.cache/lm-studio/models").expanduser()]
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        roots.append(Path(json.loads((home / "settings.json").read_bytes())["downloadsFolder"]))
    for root in roots:
        yield from repositories(root.glob("*/*"), "LM Studio")


def llama_cpp() -> Iterator[StoredModel]:
    """llama.cpp's own cache of files, whose manifests tell their repositories, or the hub's layout in the same folder."""
    cache = environment_folder("XDG_CACHE_HOME", "~/.cache") / "llama.cpp"
    root = environment_folder("LLAMA_CACHE", str(cache))
    known = [file.name.split("=")[1:3] for file in root.glob("manifest=*=*=*.json")]
    for file in sorted(root.glob("*.gguf")):
        owner = next((each for each in known if file.name.startswith("_".join(each) + "_")), None)
        if not NO_MODEL.search(file.name) and "_mmproj" not in file.name:
            yield StoredModel("/".join(owner) if owner else file.stem, tag_of(file.name) if owner else "", file, "llama.cpp")
    yield from snapshots(root, "llama.cpp")


def modelscope() -> Iterator[StoredModel]:
    """ModelScope's, in the layouts of its versions. The older ones have three underscores for each dot."""
    root = environment_folder("MODELSCOPE_CACHE", "~/.cache/modelscope")
    yield from snapshots(root / "models", "ModelScope")
    for folder in (root / "models", root / "hub" / "models", root / "hub"):
        yield from repositories(folder.glob("*/*"), "ModelScope")


def snapshots(root: Path, program: str) -> Iterator[StoredModel]:
    """The models of folders in the layout of the Hugging Face hub's cache."""
    for folder in sorted(root.glob("*--*/snapshots/*")):
        repository = folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        yield from models_of(folder, repository, program)


def repositories(folders: Iterable[Path], program: str) -> Iterator[StoredModel]:
    """The models of folders that are named after their repositories."""
    for folder in sorted(folders):
        if not folder.is_symlink():  # ModelScope's, to the folder itself
            yield from models_of(folder, f"{folder.parent.name}/{folder.name}".replace("___", "."), program)


def models_of(folder: Path, repository: str, program: str) -> Iterator[StoredModel]:
    """A repository's GGUF files, or its checkpoint."""
    files = [file for file in sorted(folder.glob("*.gguf")) if not NO_MODEL.search(file.name)]
    if (folder / "config.json").is_file() and not files:
        yield StoredModel(repository, "", folder, program)
    for file in files:
        yield StoredModel(repository, tag_of(file.name), file, program)
