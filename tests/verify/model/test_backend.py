"""The choice between transformers' code and llama.cpp."""

import importlib.util
from pathlib import Path

import pytest

from outrider import models
from outrider.verify.errors import ModelError
from outrider.verify.gguf import llama_package
from outrider.verify.model import backend
from outrider.verify.model.llama import library
from outrider.verify.model.load_options import LoadOptions, Quantization


@pytest.fixture
def file(tmp_path: Path) -> str:
    found = tmp_path / "model.gguf"
    found.touch()
    return str(found)


@pytest.fixture
def gpu_of_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where llama.cpp was built for a GPU that PyTorch does not see."""
    monkeypatch.setattr(backend, "is_installed", lambda: True)
    monkeypatch.setattr(library, "has_gpu", lambda: True)


@pytest.mark.usefixtures("gpu_of_llama")
def test_llama_computes_files_where_it_alone_has_a_gpu(file: str) -> None:
    assert backend.is_for_llama(LoadOptions(file))
    for options in (
        LoadOptions(str(models.TARGET)),
        LoadOptions(file, device="cpu"),
        LoadOptions(file, dtype="bfloat16"),
        LoadOptions(file, quantization=Quantization("int8")),
        LoadOptions(file, backend="outrider"),
        LoadOptions(file, backend="torch"),
    ):
        assert not backend.is_for_llama(options), options


def test_without_a_gpu_it_is_not_chosen(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "has_gpu", lambda: False)
    assert not backend.is_for_llama(LoadOptions(file))
    assert backend.is_for_llama(LoadOptions(file, backend="llama.cpp"))


def test_what_llama_does_not_serve_is_refused(file: str) -> None:
    with pytest.raises(ModelError, match=r"is no GGUF file; name one"):
        backend.load(LoadOptions(str(models.TARGET), backend="llama.cpp"))
    with pytest.raises(ModelError, match=r"leave out model\.quantize and model\.dtype"):
        backend.load(LoadOptions(file, backend="llama.cpp", dtype="bfloat16"))


def test_the_package_to_install_is_named(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_package.library.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(llama_package, "find_spec", lambda name: None if name == "llama_cpp" else found(name))
    with pytest.raises(ModelError, match=r"needs llama-cpp-python; install it with pip install llama-cpp-python"):
        backend.load(LoadOptions(file, backend="llama.cpp"))
