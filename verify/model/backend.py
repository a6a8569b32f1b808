"""Which backend computes a model: transformers' code with our kernels, or llama.cpp. Without the former, imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from outrider.verify.checkpoint import check_layer_count, locate
from outrider.verify.errors import ModelError, loading
from outrider.verify.gguf.llama_package import is_installed
from outrider.verify.hub import model_file
from outrider.verify.model.invariant_range import Invariant
from outrider.verify.model.llama import library
from outrider.verify.model.llama.runner import LlamaRunner
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner

if TYPE_CHECKING:
    from outrider.verify.model.adapter import Adapter


def load(options: LoadOptions) -> ModelRunner:
    """The model at `options.path`, to be started by `start`. Raises ModelError, whatever its files are."""
    with loading(f"The model at {options.path!r}"):
        if is_for_llama(options):
            return load_llama(options)
        from outrider.verify.model.loading import load_weights

        check_layer_count(options.path, options.revision)
        return load_weights(options)


def start(
    runner: ModelRunner,
    path: str,
    context_tokens: int,
    invariant: Invariant = "off",
    finding: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """As `outrider.verify.model.loading.start_model`, for the runner of any backend."""
    if not isinstance(runner, LlamaRunner):
        from outrider.verify.model.cpu.native.interface import NativeRunner
        from outrider.verify.model.loading import start_model
        from outrider.verify.model.torch_runner import TorchRunner

        assert isinstance(runner, NativeRunner | TorchRunner)
        start_model(runner, path, context_tokens, invariant, finding, tokenizer)
    elif invariant == "on":
        raise ModelError("The bits of llama.cpp's logits depend on the rows beside them; set model.invariant to auto.")
    else:
        runner.start(context_tokens)


def is_for_llama(options: LoadOptions) -> bool:
    """Whether llama.cpp computes the model: as the options say, or where nothing else has a GPU for a GGUF file."""
    if options.backend != "auto":
        return options.backend == "llama.cpp"
    from outrider.verify.model.loading import resolve_device

    has_gpu = resolve_device("auto").type != "cpu"
    if has_gpu or options.device != "auto" or not options.reads_blocks or not is_installed():
        return False
    return locate(options.path, options.revision).gguf is not None and library.has_gpu()


def load_llama(options: LoadOptions) -> LlamaRunner:
    """A GGUF file by llama.cpp, to be started. Raises ModelError."""
    location = locate(options.path, options.revision)
    if location.gguf is None:
        raise ModelError(f"model.backend is llama.cpp, but the model at {options.path!r} is no GGUF file; name one.")
    if options.quantization or options.dtype != "auto":
        raise ModelError(
            "model.backend is llama.cpp, which serves a file's weights as they are; leave out model.quantize and model.dtype."
        )
    file = model_file(location.source, location.gguf, options.revision)
    return LlamaRunner(file, options.context_tokens, options.kv_dtype, on_gpu=options.device != "cpu")


def load_adapter(runner: ModelRunner, path: str) -> Adapter:
    """A LoRA adapter of a started model, for the segments that name it. Raises ModelError."""
    if isinstance(runner, LlamaRunner):
        raise ModelError(f"The adapter {path!r} is not supported by llama.cpp as the backend; set model.backend to outrider.")
    from outrider.verify.model.loading import load_adapter

    return load_adapter(runner, path)
