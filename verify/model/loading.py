"""Loading a model from a folder or the hub: device, dtype, RoPE scaling and stop tokens."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from outrider.verify.checkpoint import (
    MODELOPT,
    SMALL_MODEL_BYTES,
    Location,
    check_format,
    quantization_settings,
    stored_bytes,
)
from outrider.verify.download import download_progress
from outrider.verify.errors import ModelError, does_not_load
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.parts import parts_of
from outrider.verify.hub import CONFIG, hub_errors, model_file, model_folder
from outrider.verify.model import file_model
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native import loading as native
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.file_config import config_of
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.invariance import start
from outrider.verify.model.load_options import Invariant, LoadOptions, Quantize
from outrider.verify.model.memory import free_bytes, return_freed_memory
from outrider.verify.model.quantization import DEQUANTIZED, check_quantization, loading_arguments, quantize_model
from outrider.verify.model.self_check import SAMPLE, check_model
from outrider.verify.model.sizes import context_limit
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.start_times import timed

log = logging.getLogger("outrider.worker")

CPU = torch.device("cpu")
# The largest difference of cosines and sines that is no rounding of the angles.
ROTARY_TOLERANCE = 1e-3
# transformers' names of kinds of layers; how they compute is found out by a forward.
SUPPORTED_LAYERS = {"attention", "conv", "full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
SUPPORTED_LAYERS |= {"hybrid", "hybrid_sliding", "mamba", "mlp", "moe"}


def load(options: LoadOptions, location: Location) -> NativeRunner | TorchRunner:
    """The model at a location, read by transformers, to be started by `start_model`. Raises ModelError."""
    if (stored_bytes(options.path) or SMALL_MODEL_BYTES) < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)  # while other processes start, a second thread slows loading down
    devices = resolve_devices(options.device)
    check_quantization(options.quantize, devices[0])
    return_freed_memory()
    torch.set_float32_matmul_precision("highest")  # rotary angles are such products, and containers may allow TF32
    is_gpu = on_gpu(devices)
    config = read_configuration(options, location, is_gpu)
    dtype = resolve_dtype(options.dtype, config, devices[0])
    is_split = "+" in options.device
    if is_split:
        from outrider.verify.model.gpu.ranks import check_ranks  # Triton is only needed on a GPU

        check_ranks(config, dtype, devices)
    folder = None if location.gguf else model_folder(location.source, options.revision, (CONFIG, MODELOPT))
    settings = {} if folder is None else quantization_settings(str(folder), options.revision)
    by_file = is_gpu and bool(location.gguf or options.quantize != "none" or settings)
    beside: AbstractContextManager[None] = nullcontext()
    if is_gpu:
        from outrider.verify.model.early_kernels import compiled_beside

        beside = compiled_beside(options, location, config, dtype, devices, by_file)
    with beside:
        reads, model = partial(read_model, options, location, config, dtype, devices[0], settings), None
        if by_file:
            with timed("reading weights and moving them to the device"), room_for(options, devices):
                model = read_blocks(options, location, config, dtype, devices, settings, reads)
        is_placed, model = model is not None, model or reads()
        if devices == (CPU,) and options.pack and (found := native.of_model(model, options)) is not None:
            return found
        check_layers(model, options.path)
        if is_split or not is_placed:
            with timed("quantising weights and moving them to the device"), room_for(options, devices, model):
                place(model, "none" if is_placed else options.quantize, devices, is_split)
    return runner_of(model, options, location)


def on_gpu(devices: Sequence[torch.device]) -> bool:
    return devices[0].type == "cuda"


def read_blocks(
    options: LoadOptions,
    location: Location,
    config: Any,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    settings: Mapping[str, Any],
    reads: Callable[[], PreTrainedModel],
) -> PreTrainedModel | None:
    """The model with blocks, on a host if it is split over the devices; None if transformers alone makes it.

    `settings` are those of quantised weights in a checkpoint, and `reads` makes transformers read them. Raises ModelError.
    """
    places = (CPU,) if "+" in options.device else devices
    is_plain = not options.trust_remote_code and settings.get("quant_method") in (None, *DEQUANTIZED)
    others = reads if options.quantize != "none" and is_plain else None
    return file_model.load(options, location, config, dtype, places, devices[0], others)


def place(model: PreTrainedModel, quantize: Quantize, devices: Sequence[torch.device], is_split: bool) -> None:
    """Quantises weights, and moves the model to the devices, each of which has a part of all layers if it `is_split`.

    Raises ModelError.
    """
    placement = Placement(model, devices[:1] if is_split else devices)
    quantize_model(model, quantize, placement)
    if not is_split:
        return placement.move()
    from outrider.verify.model.gpu.ranks import split_model

    split_model(model, devices)


@contextmanager
def room_for(options: LoadOptions, devices: Sequence[torch.device], model: PreTrainedModel | None = None) -> Iterator[None]:
    """Raises ModelError if the weights do not fit the devices, with the size of the model or of its files."""
    try:
        yield
    except torch.OutOfMemoryError:
        size = (stored_bytes(options.path) or 0) if model is None else model.get_memory_footprint()
        free = sum(map(free_bytes, devices)) / 1e9
        raise ModelError(
            f"The weights of the model at {options.path!r} take {size / 1e9:.1f} GB, more than the memory of {options.device},"
            f" of which {free:.1f} GB are free; serve a smaller or quantised model, or name more GPUs in model.device."
        ) from None


def runner_of(model: PreTrainedModel, options: LoadOptions, location: Location) -> TorchRunner:
    how = (options.pack, options.compile)
    runner = TorchRunner(model, options.context_tokens, *how, started=False, kv_dtype=options.kv_dtype)
    if location.gguf is not None:
        bits = read_metadata(model_file(location.source, location.gguf, options.revision)).bits_per_weight
        log.info("%s: %.1f bits per weight in the file, %.1f served", location.gguf, bits, runner.weight_bits)
    return runner


def read_configuration(options: LoadOptions, location: Location, on_gpu: bool = False) -> Any:
    """transformers' configuration of the model: `on_gpu`, what our own reader makes of a GGUF file. Raises ModelError."""
    known = native.read(options, location) if on_gpu and location.gguf is not None else None
    if known is not None and (found := config_of(known)) is not None:
        return found
    try:
        source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        return AutoConfig.from_pretrained(location.source, **source, **location.arguments)
    except hub_errors() as error:
        raise does_not_load(f"The model at {options.path!r}", error) from None


def read_model(
    options: LoadOptions,
    location: Location,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    settings: Mapping[str, Any],
) -> PreTrainedModel:
    """The model with its weights, as transformers reads them; `settings` as in `read_blocks`. Raises ModelError."""
    if location.gguf is not None and len(parts_of(location.gguf)) > 1:
        raise ModelError(
            f"The model at {options.path!r} is in several files, which only the compiled library and llama.cpp read; set"
            " model.device to cpu, or join them: llama-gguf-split --merge FIRST OUTPUT."
        )
    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    disable_progress_bar()
    check_format(options.path, settings)
    kind, attention = file_model.class_of(config)
    arguments = loading_arguments(config, location, options.quantize != "none" or device.type == "cpu")
    try:
        return cast(Any, kind).from_pretrained(
            location.source,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            tqdm_class=download_progress(options.path),
            **source,
            **arguments,
        )
    except hub_errors(ImportError, SafetensorError) as error:
        raise does_not_load(f"The model at {options.path!r}", error) from None
    except KeyError as error:
        if str(error) != repr(NAME):
            raise
        raise ModelError(
            f"The model at {options.path!r} cannot be served: its attention layers are not written for transformers' attention"
            " interface; serve another model."
        ) from None


def check_layers(model: PreTrainedModel, path: str) -> None:
    """Raises ModelError for kinds of layers whose cache is neither keys and values nor a state that is supported."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if unknown := sorted({str(kind) for kind in types} - SUPPORTED_LAYERS):
        raise ModelError(
            f"The model at {path!r} has {' and '.join(unknown)} layers, which are not supported; serve another one."
        )


def start_model(
    runner: TorchRunner,
    path: str,
    context_tokens: int,
    invariant: Invariant = "off",
    finding: Path | None = None,
    tokenizer: AnyTokenizer | None = None,
) -> None:
    """Makes a loaded model ready for contexts of this length, and checks that it can be served. Raises ModelError.

    `invariant` and `finding` as in `outrider.verify.model.invariance.start`. With `tokenizer`, the check reads real text.
    """
    sample = () if tokenizer is None else tokenizer.encode(SAMPLE)
    prepare(runner.model, context_tokens)
    check_rotary(runner.model, context_tokens - 1)
    start(runner, context_tokens, invariant, finding)
    try:
        check_model(runner, path, sample)
    except ModelError:
        if not runner.is_fused or runner.is_split:
            raise
        log.warning("the fused forward computes other logits than transformers' on this GPU, so transformers' serves, slower")
        runner.fuses = False
        start(runner, context_tokens, invariant, None)
        check_model(runner, path, sample)
    torch.cuda.empty_cache()  # returns the check's slot to the device


def prepare(model: PreTrainedModel, context_tokens: int | None) -> None:
    """Fixes RoPE frequencies for the context that is served."""
    limit = context_limit(model)
    fix_rope(model, model.device, min(limit, context_tokens or limit))


def fix_rope(model: torch.nn.Module, device: torch.device, length: int) -> None:
    """Fixes RoPE frequencies that depend on the forward's length, so that a token's keys do not depend on the draft.

    The dynamic and longrope scalings choose frequencies by the longest position of a forward, for which the host would wait on
    a GPU; they are fixed at those of a full context, `length`.
    """
    module: Any
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type):
            frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, device, seq_len=length)
            module.inv_freq = frequencies
            module.rope_type = "default"


def check_rotary(model: torch.nn.Module, position: int) -> None:
    """Raises ModelError if the device rounds the rotary angles up to this position, as matrix products by TF32 do."""
    positions = torch.arange(max(0, position - 63), position + 1, dtype=torch.float32)[None]
    for frequencies in (each.float().view(-1, 1) for name, each in model.named_buffers() if name.endswith("inv_freq")):
        found, exact = (frequencies @ positions.to(frequencies.device)).cpu(), frequencies.cpu() * positions
        if max(float((turn(found) - turn(exact)).abs().max()) for turn in (torch.cos, torch.sin)) > ROTARY_TOLERANCE:
            raise ModelError(
                f"The device {frequencies.device} rounds rotary angles at position {position}, so long texts would be misread;"
                " unset the environment variable NVIDIA_TF32_OVERRIDE, so that products of float32 do not use TF32."
            )


def resolve_devices(names: str) -> tuple[torch.device, ...]:
    """The devices of a list, over which layers are spread, or each is split (+). Raises ModelError as `resolve_device`."""
    return tuple(map(resolve_device, names.replace("+", ",").split(",")))


def resolve_device(name: str) -> torch.device:
    """The torch device for `name`; `auto` is a GPU if there is one. Raises ModelError if the device cannot be used."""
    device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"The device {name!r} is a GPU, but torch finds none; use cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ModelError(f"There is no {name}: torch finds {count} GPU{'s' if count > 1 else ''}, numbered from 0.")
    if device.type == "cuda":
        check_compiler()
    return device


def check_compiler() -> None:
    """Raises ModelError without Triton, or without the C compiler that it uses while the server runs."""
    if find_spec("triton") is None:
        raise ModelError("A GPU needs Triton; install it with pip install 'outrider[gpu]', or set model.device to cpu.")
    if not os.environ.get("CC") and not any(map(shutil.which, ("clang", "gcc"))):
        raise ModelError(
            "A GPU needs a C compiler, for Triton; install gcc, name another one in the environment variable CC, or set"
            " model.device to cpu."
        )


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The torch dtype for `name`. `auto` is the checkpoint's dtype.

    But float32 on a CPU for float16, and for bfloat16 where the CPU does not multiply it.
    """
    if name != "auto":
        return cast(torch.dtype, getattr(torch, name))
    stored = getattr(config, "dtype", None) or torch.float32
    if device.type != "cpu" or stored == torch.float32:
        return cast(torch.dtype, stored)
    can_multiply = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.bfloat16 if stored == torch.bfloat16 and can_multiply else torch.float32
