"""Loads multi-token prediction (MTP) layers as modules of transformers, from the target's checkpoint or its GGUF file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import cached_file

from outrider.verify.checkpoint import Location, locate
from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.parts import parts_of
from outrider.verify.heads.model import Target
from outrider.verify.heads.networks import Head, MtpHead
from outrider.verify.hub import hub_errors, model_file
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.architecture.families import BY_FILE
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.cpu.native.loading import Source
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.experts import expert_name
from outrider.verify.model.file_config import configuration
from outrider.verify.model.file_model import empty_model
from outrider.verify.model.file_tensors import NORM
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import read_configuration
from outrider.verify.model.memory import FLOAT32
from outrider.verify.model.tensors import LAYER, Tensors, file_name, names_of, read_gguf

# The parts of a mixture's weights, by the names of transformers.
EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
# transformers' `model_type` of the architectures whose layers are read from files.
KINDS = {"glm4moe": "glm4_moe", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
# Names in files of what surrounds a layer's block, by those of transformers.
AROUND = {name: f"nextn.{name}" for name in ("enorm", "hnorm", "eh_proj")} | {"post_norm": "nextn.shared_head_norm"}
ADVICE = "set draft_model.path to an EAGLE head or a draft model, or leave it unset."


def load_mtp(target: Target, revision: str) -> list[Head]:
    """The MTP layers of the model that the target was loaded from, by the depth they draft. Raises ModelError."""
    if not isinstance(target, NativeRunner):
        model: Any = target.model
        return from_checkpoint(model, model.config.name_or_path, revision)
    location = locate(target.path, revision)
    if location.gguf is not None:
        return from_file(target.path, target.decoder.architecture, location, revision)
    config = read_configuration(LoadOptions(target.path, revision), location).get_text_config()
    return from_checkpoint(empty_model(config, target.dtype), location.source, revision)


def from_checkpoint(model: Any, path: str, revision: str) -> list[Head]:
    """The layers in a checkpoint, of which `model` may be without weights. Raises ModelError."""
    config = model.config.get_text_config()
    if not hasattr(config, "num_mtp_layers") and hasattr(config, "mtp_num_hidden_layers"):
        config.num_mtp_layers = config.mtp_num_hidden_layers  # Qwen3.5's name
    count, layers = int(getattr(config, "num_mtp_layers", None) or 0), int(config.num_hidden_layers)
    if not count:
        raise ModelError(f"{path!r} has no multi-token prediction layer; {ADVICE}")
    if getattr(config, "layer_types", None) and not hasattr(config, "mtp_layer_types"):
        config.mtp_layer_types = ["full_attention"] * count
    # transformers finds layers by numbers of the published sizes.
    numbered = [rf"^model\.(language_model\.)?layers\.{layers + number}\." for number in range(count)]
    before, patterns = model.config.name_or_path, model._keys_to_ignore_on_load_unexpected
    model._keys_to_ignore_on_load_unexpected = {*patterns, *numbered}
    try:
        from transformers.modeling_layers import MtpModel

        snapshot = cached_file(path, "config.json", revision=revision)
        model.config.name_or_path = str(Path(str(snapshot)).parent)
        return heads_of(MtpModel.from_pretrained(model), path)
    except hub_errors(ImportError, TypeError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"No multi-token prediction layer of {path!r} can be loaded ({first_sentence(error)}); {ADVICE}"
        ) from None
    finally:
        model._keys_to_ignore_on_load_unexpected, model.config.name_or_path = patterns, before


def heads_of(found: Any, path: str) -> list[Head]:
    """The layers of transformers' MtpModel. Raises ModelError."""
    if found.use_shared_post_norm or found.rotary_emb is None or any(each.post_norm is None for each in found.layers):
        raise ModelError(f"The multi-token prediction layer of {path!r} is of a kind that is not supported.")
    return [MtpHead(each, found.rotary_emb, int(found.config.hidden_size)) for each in found.layers]


def from_file(path: str, known: Architecture, location: Location, revision: str) -> list[Head]:
    """The layers in a GGUF file, whose weights become float32. Raises ModelError."""
    file = model_file(location.source, str(location.gguf), revision)
    first, count = len(known.layers), int(read_metadata(file).entries.get(f"{known.name}.nextn_predict_layers", 0))
    tensors = read_gguf([file.with_name(name) for name in parts_of(file.name)])
    if not count or f"blk.{first}.nextn.eh_proj.weight" not in tensors:
        raise ModelError(
            f"{path!r} has no multi-token prediction layer: only some converters keep it; serve a file that has it, {ADVICE}"
        )
    if known.name not in KINDS:
        raise ModelError(
            f"The multi-token prediction layers of {path!r} are not supported: it is no file of {', '.join(KINDS)}; {ADVICE}"
        )
    from transformers.modeling_layers import MtpModel

    model: Any = empty_model(config_of(known, tensors, count), torch.float32)
    values, rotary = frequencies(known.rotaries[0], known.context_tokens), model.get_decoder().rotary_emb
    rotary.inv_freq, rotary.attention_scaling, rotary.rope_type = torch.from_numpy(values[0]), values[1], "default"
    with torch.device("meta"):
        found = MtpModel(model, count)
    names, less = names_of(known.name, first + count), 1.0 if BY_FILE[known.name].norms_less_one else 0.0
    state = {}
    for name, tensor in found.layers.state_dict().items():
        parts = [tensors[each].floats().reshape(-1) for each in file_names(name, first, known, tensors, names)]
        read = torch.from_numpy(np.concatenate(parts)).view(tensor.shape)
        state[name] = read - less if name.endswith(NORM) else read
    found.layers.load_state_dict(state, assign=True)
    return heads_of(found, path)


def file_names(name: str, first: int, known: Architecture, tensors: Tensors, names: Any) -> list[str]:
    """The tensors of a file, one after the other, that are a layer's parameter. `first` is the number of the first layer."""
    number, part, rest = name.split(".", 2)
    if part in AROUND:
        found = f"blk.{first + int(number)}.{AROUND[part]}.{rest}"
        return [found if part != "post_norm" or found in tensors else "output_norm.weight"]
    whole = f"model.layers.{first + int(number)}.{rest}"
    if known.mixture is not None and ".experts." in name:
        count, kinds = known.mixture.experts, EXPERTS[name.rpartition(".")[2]]
        return [expert_name(first + int(number), kind, each) for each in range(count) for kind in kinds]
    assert LAYER.search(whole) is not None
    return [str(file_name(names, whole))]


def config_of(known: Architecture, tensors: Tensors, count: int) -> Any:
    """transformers' configuration of a model of one layer and `count` MTP layers like those of the file."""
    block, layer = f"blk.{len(known.layers)}.", next(each for each in reversed(known.layers) if each.heads)
    own = {name.replace(block, "blk.0."): each for name, each in tensors.items() if name.startswith(block)}
    source = Source(replace(known, layers=(layer,)), Tensors(tensors.path, own), FLOAT32, frozenset())
    found = configuration(KINDS[known.name], BY_FILE[known.name], source)
    found.num_mtp_layers, found.mtp_layer_types = count, ["full_attention"] * count
    return found
