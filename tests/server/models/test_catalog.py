"""Which models `models.paths` names, and what is wrong with a path, in one sentence."""

from pathlib import Path
from typing import Any

import pytest

from outrider.models import packaged
from outrider.server.models.catalog import Entry, find_models
from outrider.server.settings import SettingsError, load_settings


def found(*paths: str | Path | dict[str, Any], **flags: str) -> dict[str, Entry]:
    listed = [path if isinstance(path, dict) else str(path) for path in paths]
    return find_models(load_settings(None, {"models.paths": listed, **flags}))


def checkpoint(folder: Path, size: int = 10) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(size))
    return folder


def test_a_folder_holds_files_and_checkpoints(tmp_path: Path) -> None:
    checkpoint(tmp_path / "small", 20)
    given = {"a.gguf": 3, "b-00001-of-00002.gguf": 4, "b-00002-of-00002.gguf": 5, "mmproj-a.gguf": 1, "x.txt": 1}
    for name, size in given.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "empty").mkdir()
    entries = found(tmp_path)
    sizes = {name: entry.size_bytes for name, entry in entries.items()}
    assert sizes == {"a": 3, "b-00001-of-00002": 9, "small": 20}
    assert entries["small"].path == str(tmp_path / "small")


def test_paths_of_every_kind_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "z.gguf").write_bytes(b"")
    entries = found(tmp_path / "z.gguf", "Qwen/Qwen3-8B", "owner/repository/file-Q8_0.gguf", checkpoint(tmp_path / "a"))
    assert list(entries) == ["z", "Qwen3-8B", "file-Q8_0", "a"]
    assert (entries["Qwen3-8B"].path, entries["Qwen3-8B"].size_bytes) == ("Qwen/Qwen3-8B", None)


def test_a_model_may_have_settings_of_its_own(tmp_path: Path) -> None:
    draft = checkpoint(tmp_path / "draft", 5)
    own = {
        "model": {"path": str(checkpoint(tmp_path / "large")), "name": "best", "quantize": "int8", "aliases": ["gpt-*"]},
        "draft_model": {"path": str(draft)},
        "speculation": {"drafter": "pearl", "trigram": {"table": "t"}},
    }
    entries = found("Qwen/Qwen3-4B", own, **{"model.dtype": "float32", "speculation.max_nodes": "7"})
    assert list(entries) == ["Qwen3-4B", "best"]
    best, other = entries["best"].settings, entries["Qwen3-4B"].settings
    assert (best.model.quantize, best.model.dtype, best.model.aliases) == ("int8", "float32", ("gpt-*",))
    assert (best.speculation.drafter, best.speculation.max_nodes, str(best.speculation.trigram.table)) == ("pearl", 7, "t")
    assert best.draft_model.path == str(draft) and entries["best"].size_bytes == 15
    assert (other.model.quantize, other.speculation.drafter, other.draft_model.path) == ("none", "fusion", None)


@pytest.mark.parametrize(
    ("paths", "flags", "words"),
    [
        (["./nothing/here"], {}, "no file, no folder and no Hugging Face id"),
        (["."], {}, "holds no GGUF file"),
        (["a/model", "b/model"], {}, "two models named 'model'"),
        (["a/model", "b/Model"], {}, "two models named 'Model' but for its case"),
        (["a/model"], {"draft_model.path": "b/draft"}, "draft_model.path belongs to one model"),
        ([packaged.SMOLLM2[:9]], {}, f"did you mean {packaged.SMOLLM2}"),
        ([{"model": {"quantize": "int8"}}], {}, "A model in models.paths needs its model.path"),
        ([{"model": {"path": "a/b", "quantise": "int8"}}], {}, r"no setting 'model.quantise'; did you mean model.quantize"),
        ([{"model": {"path": "a/b"}, "server": {"port": 1}}], {}, "model, draft_model, speculation, not 'server'"),
    ],
)
def test_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[Any], flags: dict[str, str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=words):
        found(*paths, **flags)
