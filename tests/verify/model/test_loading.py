"""Loading: the backend, paths, devices, dtypes, stop tokens, RoPE scaling, free memory, and errors that are one sentence."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import models
from outrider.verify import system_memory
from outrider.verify.errors import ModelError
from outrider.verify.gguf import llama_package
from outrider.verify.model import backend, loading
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.backend import load_model
from outrider.verify.model.llama import library
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import check_rotary, prepare, resolve_device, resolve_devices, resolve_dtype
from outrider.verify.model.memory import free_bytes
from outrider.verify.model.sizes import end_tokens
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.system_memory import container_limits, system_bytes
from outrider.verify.tokenizer import load_tokenizer, stop_ids
from tests.hub import MODEL, cache_models

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("path", "words"),
    [("no-such/model", "no-such/model"), *((path, "There is no folder") for path in ("./nowhere", "/no/such/folder", "a/b/c"))],
)
def test_a_missing_model_is_reported(path: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (lambda: load_model(LoadOptions(path)), lambda: load_tokenizer(path)):
        with pytest.raises(ModelError, match=rf"^.*{words}.*$"):  # one line
            load()


def test_a_revision_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache_models(monkeypatch, tmp_path, {"main": models.TARGET, "v1": models.DRAFT})
    branch, pinned = (load_weights(LoadOptions(MODEL, revision, device="cpu")).weight_bytes for revision in ("main", "v1"))
    assert pinned < branch
    with pytest.raises(ModelError, match=MODEL):
        load_weights(LoadOptions(MODEL, "v2"))


def test_a_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for load in (lambda path: load_weights(LoadOptions(path, "v1")), lambda path: load_tokenizer(path, revision="v1")):
        with pytest.raises(ModelError, match="has no revision 'v1'"):
            load(str(models.TARGET))
    with pytest.raises(ModelError, match="holds no model"):
        load_model(LoadOptions(str(tmp_path)))


def test_truncated_weights_are_reported(tmp_path: Path, tiny_runner: TorchRunner) -> None:
    tiny_runner.model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="does not load"):
        load_model(LoadOptions(str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported() -> None:
    with pytest.raises(ModelError, match="'cuda' is a GPU, but torch finds none"):
        resolve_device("cuda")


def test_compile_on_a_cpu_is_reported() -> None:
    with pytest.raises(ModelError, match="for GPUs"):
        load_model(LoadOptions(str(models.TARGET), device="cpu", compile="on", backend="torch"))


def test_weights_that_do_not_fit_the_device_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("transformers.PreTrainedModel.to", fail)
    with pytest.raises(ModelError, match=r"take 0\.0 GB, more than the memory of cpu, of which \d+\.\d GB are free"):
        load_model(LoadOptions(str(models.TARGET), device="cpu", backend="torch"))


def test_auto_prefers_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda available=available: int(available))
        assert resolve_device("auto").type == kind
    assert resolve_device("cpu") == CPU


def test_a_gpu_can_be_chosen_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_devices("cuda:1,cuda:0") == (torch.device("cuda", 1), torch.device("cuda", 0))
    with pytest.raises(ModelError, match=r"^There is no cuda:2: torch finds 2 GPUs, numbered from 0\.$"):
        resolve_devices("cuda:0,cuda:2")


def test_a_gpu_without_what_compiles_kernels_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ModelError, match=r"^A GPU needs a C compiler, for Triton; install gcc"):
        resolve_device("auto")
    monkeypatch.setenv("CC", "my-compiler")
    assert resolve_device("auto").type == "cuda"
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'outrider\[gpu\]', or set model\.device to cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("name", "stored", "device", "capability", "expected"),
    [
        ("float16", torch.float32, "cpu", "AVX2", torch.float16),  # an explicit dtype is used as it is
        ("auto", torch.bfloat16, "cpu", "AVX2", torch.float32),
        ("auto", torch.bfloat16, "cpu", "AVX512", torch.bfloat16),
        ("auto", torch.float16, "cpu", "AVX512", torch.float32),
        ("auto", torch.float16, "cuda", "AVX2", torch.float16),
        ("auto", None, "cuda", "AVX2", torch.float32),
    ],
)
def test_dtypes(
    name: str, stored: Any, device: str, capability: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert resolve_dtype(name, SimpleNamespace(dtype=stored), torch.device(device)) == expected


@pytest.mark.parametrize(
    ("configured", "of_tokenizer", "expected"),
    [(None, None, set()), (7, None, {7}), (None, 2, {2}), (7, 2, {2, 7}), ([7, 8], 7, {7, 8}), ([7, 8], 0, {0, 7, 8})],
)
def test_stop_ids_of_the_model_and_its_tokenizer(configured: Any, of_tokenizer: int | None, expected: set[int]) -> None:
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    tokenizer: Any = SimpleNamespace(eos_token_id=of_tokenizer)
    assert stop_ids(end_tokens(model), tokenizer) == expected


def test_products_of_float32_are_not_rounded_whatever_the_container_allows() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        load_weights(LoadOptions(str(models.TARGET), device="cpu", backend="torch"))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")


class Tf32(TorchDispatchMode):
    """Matrix products as tensor cores compute them, of numbers with ten bits behind the point."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.mm.default:
            args = [(each.view(torch.int32) & -(1 << 13)).view(torch.float32) for each in args]
        return func(*args, **(kwargs or {}))


def test_rounded_rotary_angles_are_refused(tiny_config: LlamaConfig) -> None:
    model = LlamaForCausalLM(tiny_config)
    check_rotary(model, 100_000)
    with (
        cast(Any, Tf32)(),
        pytest.raises(ModelError, match=r"rounds rotary angles at position 100000, .* NVIDIA_TF32_OVERRIDE"),
    ):
        check_rotary(model, 100_000)


def test_prepare_fixes_frequencies_that_depend_on_the_length(tiny_config: LlamaConfig) -> None:
    """Without it, a forward beyond the original context changes the frequencies, and with them the keys."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

    def made(context_tokens: int | None) -> LlamaForCausalLM:
        config = LlamaConfig(**{**tiny_config.to_dict(), "rope_parameters": scaling}, attn_implementation=NAME)
        model = LlamaForCausalLM(config)
        prepare(model, context_tokens)
        return model

    rotary = made(None).model.rotary_emb
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 1, 8), torch.tensor([[500]]))
    assert torch.equal(rotary.inv_freq, before)
    assert rotary.rope_type == "default"
    assert torch.equal(made(4096).model.rotary_emb.inv_freq, before)  # never beyond the model's own limit


@pytest.fixture
def file(tmp_path: Path) -> str:
    found = tmp_path / "model.gguf"
    found.touch()
    return str(found)


def test_llama_computes_files_where_it_alone_has_a_gpu(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where llama.cpp was built for a GPU that PyTorch does not see."""
    monkeypatch.setattr(backend, "is_installed", lambda: True)
    monkeypatch.setattr(library, "has_gpu", lambda: True)
    assert backend.is_for_llama(LoadOptions(file))
    assert not backend.is_for_llama(LoadOptions(str(models.TARGET)))
    changes: list[dict[str, Any]] = [{"device": "cpu"}, {"dtype": "bfloat16"}, {"quantize": "int8"}]
    for options in (*changes, {"backend": "outrider"}, {"backend": "torch"}):
        assert not backend.is_for_llama(LoadOptions(file, **options)), options


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


GB = 1 << 30
V2 = {"memory.max": "{limit}", "memory.current": "{used}", "memory.stat": "anon 5\ninactive_file {cached}\n"}
V1 = {
    "memory.limit_in_bytes": "{limit}",
    "memory.usage_in_bytes": "{used}",
    "memory.stat": "inactive_file 7\ntotal_inactive_file {cached}\n",
}


def write(folder: Path, files: dict[str, str], **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text.format(**values))


def root_of(tmp_path: Path, cgroup: str) -> Path:
    write(tmp_path / "proc/self", {"cgroup": cgroup})
    write(tmp_path / "proc", {"meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 10 kB\nMemAvailable: {48 << 20} kB\n"})
    return tmp_path


def test_the_free_memory_counts_the_page_cache(tmp_path: Path) -> None:
    assert system_bytes(root_of(tmp_path, "")) == 48 * GB


def test_the_memory_of_systems_without_meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert system_bytes(tmp_path) == 4096000
    assert container_limits(tmp_path) == []


GROUPS = {2: "0::/kubepods/pod1\n", 1: "5:devices:/docker/1\n4:memory:/docker/1\n0::/\n"}


@pytest.mark.parametrize(("version", "folder"), [(2, ""), (2, "kubepods/pod1"), (1, "memory"), (1, "memory/docker/1")])
def test_limits_of_a_container(tmp_path: Path, version: int, folder: str) -> None:
    root = root_of(tmp_path, GROUPS[version])
    write(root / "sys/fs/cgroup" / folder, V2 if version == 2 else V1, limit=4 * GB, used=3 * GB, cached=GB)
    assert container_limits(root) == [(4 * GB, 2 * GB)]
    write(root / "sys/fs/cgroup/kubepods", V2, limit="max", used=9 * GB, cached=0)
    assert container_limits(root) == [(4 * GB, 2 * GB)]


def test_a_container_has_less_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_memory, "container_limits", lambda: [(4 * GB, 3 * GB), (1 << 63, 0)])
    monkeypatch.setattr(system_memory, "system_bytes", lambda: 48 * GB)
    assert free_bytes(torch.device("cpu")) == GB
    monkeypatch.setattr(system_memory, "container_limits", list)
    assert free_bytes(torch.device("cpu")) == 48 * GB
