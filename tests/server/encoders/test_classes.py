"""Which models are encoders; and no code of an encoder's folder runs, wherever the folder names it."""

import json
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from outrider import models
from outrider.models import packaged
from outrider.server.encoders.encoder import load
from outrider.server.encoders.kind import Kind, kind_of
from outrider.server.encoders.messages import Load
from tests.server.encoders.encoders import save_all

MODULES = "sentence_transformers.sentence_transformer.modules."
ROUTER = "sentence_transformers.base.modules.router.Router"
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('')\nfrom {} import {} as Evil\n"


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def module(type_name: Any, path: str = "part") -> list[dict[str, Any]]:
    return [{"idx": 0, "name": "0", "path": path, "type": type_name}]


def router(type_name: str, part: str = "0") -> dict[str, Any]:
    return {"types": {part: type_name}, "structure": {"query": [part]}, "parameters": {"default_route": "query"}}


HOSTILE: dict[str, dict[str, Any]] = {
    "a module": {"modules.json": module("evil.Evil", "")},
    "a repository": {"modules.json": module("x/y--evil.Evil")},
    "a route": {"modules.json": module(ROUTER), "part/router_config.json": router("evil.Evil")},
    "a route of an earlier version": {"modules.json": module(ROUTER, ""), "config.json": router("evil.Evil")},
    "a route of a route": {
        "modules.json": module(ROUTER),
        "part/router_config.json": router(ROUTER),
        "part/0/router_config.json": router("evil.Evil"),
    },
    "outside": {"modules.json": module(ROUTER, "../outside"), "../outside/router_config.json": router("evil.Evil")},
    "a tokenizer": {
        "modules.json": module(f"{MODULES}WordEmbeddings"),
        "part/wordembedding_config.json": {"tokenizer_class": "evil.Evil", "update_embeddings": False},
    },
    "a circle": {
        "modules.json": module(ROUTER, ""),
        "router_config.json": {**router(ROUTER, "."), "types": {".": ROUTER, "0": "evil.Evil"}},
    },
}


@pytest.mark.parametrize("files", HOSTILE.values(), ids=HOSTILE)
def test_a_class_that_is_not_of_sentence_transformers_is_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    for name, content in files.items():
        write(folder, name, content)
    write(folder, "evil.py", CODE.format("sentence_transformers", "SentenceTransformer"))
    with pytest.raises(ValueError, match=r"is not part of sentence-transformers; set model\.trust_remote_code"):
        load(request(folder))
    assert not list(tmp_path.rglob("ran"))


def test_a_class_of_the_folder_runs_for_who_trusts_it(tmp_path: Path) -> None:
    save_all(tmp_path)
    folder = tmp_path / "embedder"
    assert load(request(folder)).loaded.max_tokens == 32
    modules = json.loads((folder / "modules.json").read_text())
    modules[-1]["type"] = "evil.Evil"
    write(folder, "modules.json", modules)
    write(folder, "evil.py", CODE.format(f"{MODULES}normalize", "Normalize"))
    with pytest.raises(ValueError, match=r"names the class 'evil\.Evil'"):
        load(request(folder))
    assert isinstance(load(request(folder, trusts=True)).model, SentenceTransformer)  # type: ignore[attr-defined]


def request(folder: Path, trusts: bool = False) -> Load:
    return Load("embeddings", str(folder), "main", "cpu", "auto", None, trusts)


CASES: list[tuple[Kind | None, dict[str, Any]]] = [
    ("embeddings", {"modules.json": [], "config_sentence_transformers.json": {"prompts": {}}, "config.json": {}}),
    ("embeddings", {"config.json": {"model_type": "model2vec"}}),
    ("embeddings", {"config.json": {"architectures": ["ModernBertForMaskedLM"]}}),
    ("rerank", {"config.json": {"architectures": ["XLMRobertaForSequenceClassification"]}}),
    ("rerank", {"modules.json": [], "config_sentence_transformers.json": {"model_type": "CrossEncoder"}, "config.json": {}}),
    (None, {"config.json": {"architectures": ["LlamaForCausalLM"]}}),
    (None, {"config.json": {}}),
]


@pytest.mark.parametrize(("kind", "files"), CASES)
def test_kinds(tmp_path: Path, kind: Kind | None, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert kind_of(str(tmp_path), "main", download=False) == kind


@pytest.mark.parametrize("path", [str(models.TARGET), packaged.SMOLLM2_FILE, "owner/never-downloaded", "../nothing", ""])
def test_models_that_write_text(path: str) -> None:
    assert kind_of(path, "main", download=False) is None
