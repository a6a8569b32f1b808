"""Loads what the library computes: GGUF files as they are, checkpoints, and models that transformers has unpacked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.verify.checkpoint import INDEX, MODELOPT, READERS, REQUIRED, WEIGHTS, Location, quantization_settings, read_json
from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.parts import parts_of
from outrider.verify.hub import CONFIG, model_file, model_folder
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.architecture.metadata import read_entries
from outrider.verify.model.architecture.standard import is_tied, text_config
from outrider.verify.model.cpu.native.decoder import Decoder, pack, supports
from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.packed_file import NOT_KEPT, PackedFile, file_of
from outrider.verify.model.cpu.native.packing import Precision
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import Kind
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.memory import BFLOAT16, FLOAT16, FLOAT32, HostType
from outrider.verify.model.quantized.formats import METHODS, whole_layers
from outrider.verify.model.quantized.integers import UnknownFormatError
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import Tensors, as_gguf, read_gguf, read_safetensors, stored_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("outrider.worker")
GENERATION = "generation_config.json"
# A checkpoint may have it though it is tied to the embedding table.
TIED_HEAD = "lm_head.weight"
# The names of what computes text begin so in a checkpoint that also has what reads pictures.
TEXT = "model.language_model."
# Data types of keys and values by their names in configurations.
DTYPES = {str(each): each for each in (FLOAT32, FLOAT16, BFLOAT16)}


class Source(NamedTuple):
    """What files say about a model."""

    known: Architecture
    tensors: Tensors  # by the names of GGUF files
    dtype: HostType  # of keys and values
    ends: frozenset[int]  # the tokens that end an answer
    files: Sequence[Path] = ()


def load(options: LoadOptions, location: Location) -> NativeRunner | None:
    """The model at a location; None if the library does not compute it, or if only transformers can read it.

    Raises ModelError.
    """
    source = None if compiled_library() is None or not options.pack else read(options, location)
    found = None if source is None else build(source, options)
    if found is not None and source is not None and location.gguf is not None:
        tensors = source.tensors.values()
        bits = 8 * sum(each.rows.nbytes for each in tensors) / sum(prod(each.shape) for each in tensors)
        log.info("%s: %.1f bits per weight in the file, %.1f served", location.gguf, bits, found.weight_bits)
    return found


def read(options: LoadOptions, location: Location) -> Source | None:
    """What the files of a model say; None if its family is not known, or if only transformers can read it.

    Raises ModelError.
    """
    return read_checkpoint(options, location) if location.gguf is None else read_file(options, location)


def read_file(options: LoadOptions, location: Location) -> Source | None:
    """The model in a GGUF file, with its blocks as they are."""
    assert location.gguf is not None
    path = model_file(location.source, location.gguf, options.revision)
    metadata, files = read_metadata(path), [path.with_name(name) for name in parts_of(path.name)]
    tensors = read_gguf(files)
    vectors = {name: each.floats().tolist() for name, each in tensors.items() if name.startswith("rope_f")}
    try:
        known = read_entries(metadata.entries, tensors["token_embd.weight"].shape[0], vectors)
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ModelError(f"{str(path)!r} lacks a part of its description ({error!r}); download it again.") from None
    dtype = DTYPES["bfloat16" if options.dtype == "auto" else options.dtype]
    end = metadata.entries.get("tokenizer.ggml.eos_token_id")
    ends = frozenset[int]() if end is None else frozenset([end])
    return None if known is None else Source(known, tensors, dtype, ends, files)


def read_checkpoint(options: LoadOptions, location: Location) -> Source | None:
    """The model in a folder or of a hub id; None also if its weights are quantised in a way that is not known."""
    folder = model_folder(location.source, options.revision, (CONFIG, GENERATION, INDEX, MODELOPT))
    whole = read_json(str(folder), CONFIG, options.revision)
    if "model_type" not in whole:
        raise ModelError(f"No model at {options.path!r}: it has no {CONFIG} that names a model_type; name another one.")
    if whole.get("model_type") in READERS or (options.trust_remote_code and whole.get("auto_map")):
        return None
    config = text_config(whole)  # what reads pictures or sounds is left out
    known = read_config(config)
    settings = quantization_settings(str(folder), options.revision)
    method = settings.get("quant_method")
    if known is None or not supports(known) or method not in (None, "mxfp4", *METHODS):
        return None
    files = weight_files(options, location, folder)
    stored = read_safetensors(options.path, files)
    if stored is not None and method in METHODS:
        stored = with_whole_layers(options.path, stored, settings)
    named = None if stored is None else by_names(known, stored, is_tied(config), options.path)
    if named is None:
        return None
    generation = read_generation(folder, options.revision) or config
    return Source(known, named, resolve_dtype(options.dtype, {**whole, **config}), end_tokens(generation), files)


def with_whole_layers(path: str, tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Stored] | None:
    """The tensors of a quantised checkpoint, one for each layer; None if only transformers may read them. Raises ModelError."""
    method = settings["quant_method"]
    try:
        return whole_layers(tensors, settings)
    except UnknownFormatError as error:
        if method in REQUIRED:
            log.info("the library does not read the weights of %s, in the format %s: %s", path, method, error)
            return None
        raise ModelError(
            f"The weights of {path!r} are in a form of {method} that is not read here ({error}); serve a GGUF file of the"
            " model, or another checkpoint."
        ) from None
    except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(
            f"The quantised weights of {path!r} are not as its {CONFIG} says ({error!r}); download it again."
        ) from None


def of_model(model: PreTrainedModel, options: LoadOptions) -> NativeRunner | None:
    """The model that transformers has loaded; None if the library does not compute it, or if weights are not unpacked."""
    config = model.config.to_dict()
    known = None if compiled_library() is None else read_config(config)
    if known is None or not supports(known):
        return None
    found = {name: stored_tensor(each) for name, each in model.state_dict().items()}
    tensors = {name: each for name, each in found.items() if each is not None}
    named = by_names(known, tensors, is_tied(config), options.path)
    if named is None or len(tensors) < len(found):
        return None
    ends = end_tokens(model.generation_config.to_dict())
    return build(Source(known, named, resolve_dtype(options.dtype, config), ends), options)


def by_names(known: Architecture, tensors: Mapping[str, Stored], tied: bool, path: str) -> Tensors | None:
    """A checkpoint's tensors by the names of GGUF files, without a head that is the embedding table if it is `tied`."""
    if any(name.startswith(TEXT) for name in tensors):
        kept = (name for name in tensors if name.startswith(TEXT) or name == TIED_HEAD)
        tensors = {name.replace(TEXT, "model.", 1): tensors[name] for name in kept}
    own = {name: each for name, each in tensors.items() if not (tied and name == TIED_HEAD)}
    return as_gguf(path, own, known)


def weight_files(options: LoadOptions, location: Location, folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, of which the folder has the index if there is one. Raises ModelError."""
    index = read_json(str(folder), INDEX, options.revision)
    names = sorted({*map(str, index["weight_map"].values())}) if index else [WEIGHTS]
    from outrider.verify.download import download_progress

    found = model_folder(location.source, options.revision, names, download_progress(options.path))
    if missing := [name for name in names if not (found / name).is_file()]:
        raise ModelError(f"The model at {options.path!r} has no {missing[0]}; download it again, or name another one.")
    return [found / name for name in names]


def files_of(options: LoadOptions, location: Location) -> tuple[list[Path], frozenset[int] | None]:
    """The files of a model's weights, and the tokens that end an answer, of a model that only transformers reads.

    None instead of tokens if its configuration has them. Raises ModelError.
    """
    if location.gguf is not None:
        return [model_file(location.source, location.gguf, options.revision)], None
    folder = model_folder(location.source, options.revision, (CONFIG, GENERATION, INDEX))
    return weight_files(options, location, folder), end_tokens(read_generation(folder, options.revision)) or None


def read_generation(folder: Path, revision: str) -> dict[str, Any]:
    """A model's generation_config.json; empty if it has none, or one that cannot be read, of which the front end tells."""
    try:
        return read_json(str(folder), GENERATION, revision)
    except (OSError, ValueError):
        return {}


def build(source: Source, options: LoadOptions) -> NativeRunner | None:
    """Packs the weights, or maps them if an earlier start has packed the same files."""
    known, tensors, dtype, ends, files = source
    if not supports(known):
        return None
    rounding = precision(options)
    path = file_of(options.packed_folder if files else None, files, known, rounding)
    decoder, file = packed(known, tensors, rounding, path, sum(each.stat().st_size for each in files))
    if decoder is None:
        return None
    runner = NativeRunner(decoder, options.path, dtype, ends, options.context_tokens, options.kv_dtype)
    runner.held_bytes, runner.maps_weights = file.taken, file.is_mapped
    return runner


def packed(
    known: Architecture, tensors: Tensors, rounding: Precision, path: Path | None, nbytes: int
) -> tuple[Decoder | None, PackedFile]:
    """The decoder, and its weights: in the file at `path`, or in new memory if they cannot be kept there.

    `nbytes` are those of the model's files.
    """
    try:
        with PackedFile(path, nbytes) as file:
            return pack(known, tensors, Engine.shared(), rounding, file), file
    except OSError as error:
        log.info(NOT_KEPT, error)
    file = PackedFile()
    return pack(known, tensors, Engine.shared(), rounding, file), file


def precision(options: LoadOptions) -> Precision:
    rest = None if options.dtype == "auto" else Kind.BFLOAT16 if options.dtype == "bfloat16" else Kind.FLOAT32
    layers = {"none": None, "int8": Kind.INT8, "int4": Kind.INT4}[options.quantize]
    # The head takes a large part of a small model's step, and 4 bits of it change few of the likeliest tokens.
    head = Kind.INT4 if options.is_draft else rest if layers is None else Kind.INT8
    return Precision(layers, head, rest)


def resolve_dtype(name: str, config: Mapping[str, Any]) -> HostType:
    """The data type of keys and values: float32 for a checkpoint in float16."""
    if name != "auto":
        return DTYPES[name]
    stored = str(config.get("dtype") or config.get("torch_dtype") or FLOAT32).removeprefix("torch.")
    return DTYPES.get(stored if stored != str(FLOAT16) else str(FLOAT32), FLOAT32)


def end_tokens(config: Mapping[str, Any]) -> frozenset[int]:
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
