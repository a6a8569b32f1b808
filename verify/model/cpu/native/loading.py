"""Loads what the library computes: GGUF files as they are, checkpoints, and models that transformers has unpacked."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.verify.checkpoint import READERS, Location, quantization_method
from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.hub import hub_errors, model_file
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.architecture.metadata import read_entries
from outrider.verify.model.cpu.native.decoder import pack, supports
from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.packed_file import PackedFile, file_of
from outrider.verify.model.cpu.native.packing import Precision
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import Kind
from outrider.verify.model.data_types import BFLOAT16, FLOAT16, FLOAT32, HostType
from outrider.verify.model.load_options import LoadOptions, Quantization
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import Tensors, as_gguf, read_gguf, read_safetensors, stored_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("outrider.worker")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# A checkpoint may have it though it is tied to the embedding table.
TIED_HEAD = "lm_head.weight"
# The names of what computes text begin so in a checkpoint that also has what reads pictures.
TEXT = "model.language_model."
# Data types of keys and values by their names in configurations.
DTYPES = {str(each): each for each in (FLOAT32, FLOAT16, BFLOAT16)}


def can_compute(config: Any) -> bool:
    """Whether the library was compiled for this CPU and computes models of this configuration."""
    known = None if compiled_library() is None else read_config(config)
    return known is not None and supports(known)


def load(options: LoadOptions, location: Location) -> NativeRunner | None:
    """The model at a location; None if the library does not compute it, or if only transformers can read it.

    Raises ModelError.
    """
    if compiled_library() is None or not options.pack:
        return None
    return load_checkpoint(options, location) if location.gguf is None else load_gguf(options, location)


def load_gguf(options: LoadOptions, location: Location) -> NativeRunner | None:
    """The model in a GGUF file, its blocks packed as they are unless the options name another precision."""
    assert location.gguf is not None
    path = model_file(location.source, location.gguf, options.revision)
    metadata = read_metadata(path)
    tensors = read_gguf(Path(path), metadata)
    vectors = {name: each.floats().tolist() for name, each in tensors.items() if name.startswith("rope_f")}
    try:
        known = read_entries(metadata.entries, tensors["token_embd.weight"].shape[0], vectors)
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ModelError(f"{str(path)!r} lacks a part of its description ({error!r}); download it again.") from None
    dtype = DTYPES["bfloat16" if options.dtype == "auto" else options.dtype]
    end = metadata.entries.get("tokenizer.ggml.eos_token_id")
    ends = frozenset[int]() if end is None else frozenset([end])
    found = None if known is None else build(known, tensors, options, dtype, ends, [Path(path)])
    if found is not None:
        bits = metadata.bits_per_weight
        log.info("%s: %.1f bits per weight in the file, %.1f served", location.gguf, bits, found.weight_bits)
    return found


def load_checkpoint(options: LoadOptions, location: Location) -> NativeRunner | None:
    """The model in a folder or of a hub id; None also if its weights are quantised."""
    from transformers import AutoConfig, GenerationConfig

    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(location.source, **source)
    except hub_errors() as error:
        raise ModelError(f"No model at {options.path!r}: {first_sentence(error)}") from None
    config = config if config.model_type in READERS else config.get_text_config()  # what reads pictures or sounds is left out
    has_code = options.trust_remote_code and getattr(config, "auto_map", None)
    if not can_compute(config) or quantization_method(config) not in (None, "mxfp4") or has_code:
        return None
    known = read_config(config)
    assert known is not None
    files = weight_files(options, location)
    stored = read_safetensors(options.path, files)
    named = None if stored is None else by_names(known, stored, config, options.path)
    if named is None:
        return None
    try:
        generation = GenerationConfig.from_pretrained(location.source, revision=options.revision)
    except hub_errors():
        generation = GenerationConfig.from_model_config(config)
    return build(known, named, options, resolve_dtype(options.dtype, config), end_tokens(generation), files)


def of_model(model: PreTrainedModel, options: LoadOptions) -> NativeRunner | None:
    """The model that transformers has loaded; None if the library does not compute it, or if weights are not unpacked."""
    config = model.config
    if not can_compute(config):
        return None
    known = read_config(config)
    assert known is not None
    found = {name: stored_tensor(each) for name, each in model.state_dict().items()}
    tensors = {name: each for name, each in found.items() if each is not None}
    named = by_names(known, tensors, config, options.path)
    if named is None or len(tensors) < len(found):
        return None
    return build(known, named, options, resolve_dtype(options.dtype, config), end_tokens(model.generation_config))


def by_names(known: Architecture, tensors: Mapping[str, Stored], config: Any, path: str) -> Tensors | None:
    """A checkpoint's tensors by the names of GGUF files, without a head that is the embedding table."""
    if any(name.startswith(TEXT) for name in tensors):
        kept = (name for name in tensors if name.startswith(TEXT) or name == TIED_HEAD)
        tensors = {name.replace(TEXT, "model.", 1): tensors[name] for name in kept}
    tied = {TIED_HEAD} if config.tie_word_embeddings else set()
    own = {name: each for name, each in tensors.items() if name not in tied}
    return as_gguf(path, own, known)


def weight_files(options: LoadOptions, location: Location) -> list[Path]:
    """The files of a checkpoint's weights. Raises ModelError."""
    from transformers.utils import cached_file
    from transformers.utils.hub import cached_files

    source: dict[str, Any] = {"revision": options.revision}
    try:
        index = cached_file(location.source, INDEX, **source, _raise_exceptions_for_missing_entries=False)
        names = [SINGLE] if index is None else sorted({*json.loads(Path(index).read_text())["weight_map"].values()})
        from outrider.verify.model.download import download_progress

        found = cached_files(location.source, names, **source, tqdm_class=download_progress(options.path))
    except hub_errors(KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"The model at {options.path!r} does not load: {first_sentence(error)}") from None
    return [Path(each) for each in found or []]


def build(
    known: Architecture,
    tensors: Tensors,
    options: LoadOptions,
    dtype: HostType,
    ends: frozenset[int],
    files: Sequence[Path] = (),
) -> NativeRunner | None:
    """Packs the weights, or maps them if an earlier start has packed those of the same files."""
    if not supports(known):
        return None
    rounding = precision(options.quantization, options.dtype)
    file = PackedFile(file_of(options.packed_folder if files else None, files, known, rounding))
    decoder = pack(known, tensors, Engine.shared(), rounding, file)
    if decoder is None:
        return None
    file.save_later()
    runner = NativeRunner(decoder, options.path, dtype, ends, options.context_tokens, options.kv_dtype)
    runner.held_bytes, runner.maps_weights = file.taken, file.is_filled
    return runner


def precision(quantization: Quantization, dtype: str) -> Precision:
    """How weights are rounded."""
    rest = None if dtype == "auto" else Kind.BFLOAT16 if dtype == "bfloat16" else Kind.FLOAT32
    if not quantization:
        return Precision(None, rest, rest)
    return Precision(Kind.INT4 if quantization.layers == "int4" else Kind.INT8, Kind.INT8, rest)


def resolve_dtype(name: str, config: Any) -> HostType:
    """The data type of keys and values: float32 for a checkpoint in float16."""
    if name != "auto":
        return DTYPES[name]
    stored = str(getattr(config, "dtype", None) or FLOAT32).removeprefix("torch.")
    return DTYPES.get(stored if stored != str(FLOAT16) else str(FLOAT32), FLOAT32)


def end_tokens(generation: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    ids = getattr(generation, "eos_token_id", None)
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
