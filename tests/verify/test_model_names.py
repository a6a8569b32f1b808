"""The names of models that people paste, over folders laid out as the programs do that made them."""

import json
from pathlib import Path

import pytest

from outrider.verify import model_names
from outrider.verify.checkpoint import locate
from outrider.verify.errors import ModelError
from outrider.verify.model_names import resolve
from outrider.verify.model_stores import stored_models, tag_of
from tests.hub import MODEL, cache_models, serving_hub


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models, and no hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_names, "free_bytes", lambda: 1000)
    return tmp_path


def put(file: Path, size: int = 10) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


def put_manifest(home: Path, name: str, digest: str) -> None:
    layers = [{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:t"}]
    layers += [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]
    file = put(home / ".ollama/models/manifests" / name)
    file.write_text(json.dumps({"layers": layers}))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("owner/model:Q4_K_M", ".lmstudio/models/owner/model/model-Q4_K_M.gguf"),
        ("hf.co/owner/model:q8_0", ".lmstudio/models/owner/model/model-Q8_0.gguf"),
        ("Owner/Model", ".cache/lm-studio/models/owner/model/model.gguf"),
        ("https://huggingface.co/owner/model/tree/main", ".lmstudio/models/owner/model/model.Q4_0.gguf"),
        ("owner/model:Q4_K_XL", ".cache/llama.cpp/models--owner--model/snapshots/abc/model-UD-Q4_K_XL.gguf"),
        ("owner/model-GGUF:F16", ".cache/llama.cpp/owner_model-GGUF_model-f16.gguf"),
        ("modelscope.cn/owner/m-1.5B", ".cache/modelscope/hub/models/owner/m-1___5B/m-q4_0.gguf"),
        ("modelscope://owner/model", ".cache/modelscope/models/owner--model/snapshots/master/model-Q4_0.gguf"),
    ],
)
def test_files_of_other_programs_are_found(home: Path, name: str, file: str) -> None:
    put(home / ".cache/llama.cpp/manifest=owner=model-GGUF=latest.json")
    put(home / Path(file).parent / "mmproj-model-F16.gguf")
    wanted = put(home / file)
    assert resolve(name).path == str(wanted)


def test_a_checkpoint_of_modelscope_is_a_folder(home: Path) -> None:
    folder = put(home / ".cache/modelscope/hub/owner/model/config.json").parent
    assert resolve("modelscope.cn/models/owner/model").path == resolve("owner/model").path == str(folder)


@pytest.mark.parametrize(
    ("manifest", "name", "link"),
    [
        ("registry.ollama.ai/library/qwen3/8b", "qwen3:8b", "qwen3:8b.gguf"),
        ("registry.ollama.ai/library/qwen3/latest", "qwen3", "qwen3:latest.gguf"),
        ("hf.co/owner/model/Q4_K_M", "hf.co/owner/model:Q4_K_M", "owner-model:Q4_K_M.gguf"),
    ],
)
def test_ollamas_blobs_are_served_by_the_name_they_have_there(home: Path, manifest: str, name: str, link: str) -> None:
    blob = put(home / ".ollama/models/blobs/sha256-abc")
    put_manifest(home, manifest, "sha256:abc")
    put_manifest(home, "registry.ollama.ai/library/other/latest", "sha256:missing")
    put(home / ".ollama/models/manifests/registry.ollama.ai/library/broken/latest")
    for _ in range(2):  # the link may be there
        found = Path(resolve(name).path)
        assert found.name == link and found.resolve() == blob
    assert len(stored_models()) == 1


@pytest.mark.parametrize(
    ("sizes", "tag", "words"),
    [
        ({"Q4_K_M": 500, "Q8_0": 700}, "Q4_K_M", "which fits"),
        ({"Q4_K_M": 900, "Q3_K_M": 700, "Q2_K": 300}, "Q3_K_M", "which fits"),
        ({"F16": 5000, "Q8_0": 3000}, "Q8_0", "the smallest, as none fits"),
    ],
)
def test_a_folder_of_several_files_takes_what_fits_and_says_so(home: Path, sizes: dict[str, int], tag: str, words: str) -> None:
    for name, size in sizes.items():
        put(home / "models" / f"m-{name}.gguf", size)
    put(home / "models" / "mmproj-m.gguf")
    found = resolve(str(home / "models"))
    assert found.path.endswith(f"m-{tag}.gguf")
    assert f"this is {tag}, {words}" in found.note and found.note.endswith(".gguf.")


def test_the_hub_is_asked_for_what_is_not_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model-Q8_0.gguf", "model-Q4_K_M.gguf", "config.json"):
        put(home / "main" / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving_hub({"main": home / "main"}) as (url, asked):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert resolve(f"{MODEL}:Q8_0").path == f"{MODEL}/model-Q8_0.gguf"
        assert resolve(MODEL).path == f"{MODEL}/model-Q4_K_M.gguf"
        with pytest.raises(ModelError, match=r"^someone/model has no Q2_K, but (Q8_0, Q4_K_M|Q4_K_M, Q8_0)\.$"):
            resolve(f"{MODEL}:Q2_K")
        put(home / "main" / "model.safetensors")
        assert resolve(MODEL).path == MODEL
        assert asked


def test_the_parts_of_a_model_are_one_file_also_in_a_folder_of_a_repository(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = [f"Q8_0/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)], "m-Q2_K.gguf"
    for name, size in {**dict.fromkeys(large, 400), small: 500, "Q8_0/mmproj-F16.gguf": 9}.items():
        put(home / "main" / name, size)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving_hub({"main": home / "main"}) as (url, _):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert resolve(f"{MODEL}:q8_0").path == f"{MODEL}/{large[0]}"
        assert "has Q8_0, Q2_K; this is Q2_K, which fits" in resolve(MODEL).note  # of 1,000 bytes, 1,200 are too many
    cache_models(monkeypatch, home / "hub", {"main": home / "main"})
    found = resolve(f"{MODEL}:Q8_0").path
    location = locate(found)
    assert (found, location.source, location.gguf) == (f"{MODEL}/{large[0]}", MODEL, large[0])


def test_the_hubs_cache_needs_no_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home / "main" / "model-Q8_0.gguf")
    cache_models(monkeypatch, home / "hub", {"main": home / "main"})
    assert resolve(MODEL).path == resolve(f"hf.co/{MODEL}:Q8_0").path == f"{MODEL}/model-Q8_0.gguf"


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", "./nowhere", "/no/x.gguf", "gpt2"]
)
def test_names_that_mean_nothing_here_stay(name: str) -> None:
    assert resolve(name).path == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3:8b", "Ollama has no model 'qwen3:8b' on this machine"),
        ("owner/model:Q4_K_M", "owner/model:Q4_K_M cannot be downloaded: "),
        ("modelscope.cn/owner/model", "download it with: modelscope download --model owner/model"),
    ],
)
def test_names_that_cannot_be_found_are_one_sentence(name: str, words: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve(name)
    assert words in str(error.value) and "\n" not in str(error.value)


TAGS = [("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"), ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("gpt-oss-20b-MXFP4.gguf", "MXFP4")]


@pytest.mark.parametrize(("file", "tag"), [*TAGS, ("qwen2.5-7b-q8_0-00001-of-00002.gguf", "Q8_0"), ("tiny.gguf", "tiny")])
def test_a_files_name_tells_its_types(file: str, tag: str) -> None:
    assert tag_of(file) == tag


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "'' names no model"),
        ("  ", "names no model"),
        ("https://example.org/model.gguf", "names no model"),
        (__file__, "is neither a folder nor a GGUF file"),
        ("/no/such/folder", "There is no folder"),
        ("no-such.gguf", "There is no file"),
    ],
)
def test_what_is_no_models_path_is_one_sentence(path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        locate(path)
