"""Chooses a model's backend: the compiled library, transformers' code, or llama.cpp. Only the second imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.verify.checkpoint import READERS, Location, check_layer_count, locate, read_json
from outrider.verify.errors import ModelError, loading
from outrider.verify.gguf.llama_package import is_installed
from outrider.verify.hub import CONFIG, model_file
from outrider.verify.model.adapter import Adapter, UnfitAdapter, read_adapter
from outrider.verify.model.cpu.native import loading as native
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.llama import library
from outrider.verify.model.llama.runner import LlamaRunner
from outrider.verify.model.load_options import Invariant, LoadOptions
from outrider.verify.model.memory import has_graphics
from outrider.verify.model.runner import ModelRunner
from outrider.verify.packages import TORCH, TRANSFORMERS, has_torch, require
from outrider.verify.start_times import timed

if TYPE_CHECKING:
    from outrider.verify.fast_tokenizer import AnyTokenizer


def load_model(options: LoadOptions) -> ModelRunner:
    """The model at `options.path`, started for its longest context. Raises ModelError."""
    runner = load(options)
    start(runner, options.path, runner.context_tokens)
    return runner


def load(options: LoadOptions) -> ModelRunner:
    """The model at `options.path`, to be started by `start`. Raises ModelError, whatever its files are."""
    with loading(f"The model at {options.path!r}"):
        if is_for_llama(options):
            return load_llama(options)
        check_layer_count(options.path, options.revision)
        location = locate(options.path, options.revision)
        if options.pack and is_cpu(options.device) and (found := native.load(options, location)) is not None:
            return found
        require(reason_for_torch(options, location), TORCH, TRANSFORMERS)
        with timed("importing PyTorch and transformers"):
            from outrider.verify.model.loading import load as load_by_torch

        return load_by_torch(options, location)


def reason_for_torch(options: LoadOptions, location: Location) -> str:
    """The beginning of a sentence that says what needs PyTorch: "model.device is 'cuda', which"."""
    if options.backend == "torch":
        return "model.backend is torch, which"
    if not is_cpu(options.device):
        return f"model.device is {options.device!r}, which"
    if compiled_library() is None:
        return f"Without the compiled library, which a C++ compiler builds during installation, the model at {options.path!r}"
    if location.gguf is None and read_json(location.source, CONFIG, options.revision).get("model_type") in READERS:
        return f"The model at {options.path!r} reads pictures, for which it"
    return f"The model at {options.path!r}, whose family or format the compiled library does not compute,"


def start(
    runner: ModelRunner,
    path: str,
    context_tokens: int,
    invariant: Invariant = "off",
    finding: Path | None = None,
    tokenizer: AnyTokenizer | None = None,
) -> None:
    """`outrider.verify.model.loading.start_model` for the runner of any backend."""
    if isinstance(runner, LlamaRunner) and invariant == "on":
        raise ModelError("The bits of llama.cpp's logits depend on the rows beside them; set model.invariant to auto.")
    if isinstance(runner, LlamaRunner | NativeRunner):
        return runner.start(context_tokens)
    from outrider.verify.model.loading import start_model
    from outrider.verify.model.torch_runner import TorchRunner

    assert isinstance(runner, TorchRunner)
    start_model(runner, path, context_tokens, invariant, finding, tokenizer)


def is_for_llama(options: LoadOptions) -> bool:
    """Whether llama.cpp computes the model: as the options say, or where nothing else has a GPU for a GGUF file."""
    if options.backend != "auto":
        return options.backend == "llama.cpp"
    names_precision = options.dtype != "auto" or options.quantize != "none"
    if options.device != "auto" or names_precision or not is_installed() or not is_cpu("auto"):
        return False
    return locate(options.path, options.revision).gguf is not None and library.has_gpu()


def is_cpu(device: str) -> bool:
    """Whether this names the CPU; `auto` does where PyTorch finds no GPU. Imports torch only where there may be one."""
    if device != "auto" or not has_graphics() or not has_torch():
        return device in ("auto", "cpu")
    with timed("importing PyTorch and transformers"):
        from outrider.verify.model.loading import resolve_device

    return resolve_device(device).type == "cpu"


def load_llama(options: LoadOptions) -> LlamaRunner:
    """A GGUF file by llama.cpp, to be started. Raises ModelError."""
    location = locate(options.path, options.revision)
    if location.gguf is None:
        raise ModelError(f"model.backend is llama.cpp, but the model at {options.path!r} is no GGUF file; name one.")
    if options.quantize != "none" or options.dtype != "auto":
        raise ModelError(
            "model.backend is llama.cpp, which serves a file's weights as they are; leave out model.quantize and model.dtype."
        )
    file = model_file(location.source, location.gguf, options.revision)
    return LlamaRunner(file, options.context_tokens, options.kv_dtype, on_gpu=options.device != "cpu")


def load_adapter(runner: ModelRunner, path: str) -> Adapter:
    """A LoRA adapter of a started model, for the segments that name it. Raises ModelError."""
    if isinstance(runner, LlamaRunner):
        raise ModelError(f"The adapter {path!r} is not supported by llama.cpp as the backend; set model.backend to outrider.")
    if not isinstance(runner, NativeRunner):
        raise ModelError(
            f"The adapter {path!r} is not supported: adapters need a model that the compiled library computes, on a CPU;"
            " merge it into the model's weights instead."
        )
    try:
        return runner.hold(read_adapter(path))
    except UnfitAdapter as error:
        raise ModelError(f"The adapter {path!r} {error}; name one that was trained for this model.") from None
