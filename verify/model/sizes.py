"""The weights that a step reads, linear layers whose weights are kept in another form, and a model's context and cache."""

from typing import TypeGuard, cast

import torch
from transformers import PreTrainedModel


class PackedLayer(torch.nn.Module):
    """Replaces a torch.nn.Linear, [..., N, in_features] to [..., N, out_features]; of it, only the bias is kept."""

    is_quantized = False
    kernel = ""  # name of the kernel, for people

    def __init__(self, linear: torch.nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        # Some models ask for its data type and device; one that computes with it is refused.
        self.weight = torch.empty(0, dtype=self.dtype, device=device)
        self.bias = linear.bias
        self.nbytes = 0  # bytes of the weights


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether the module is a linear layer that may be replaced.

    Subclasses, of the layer or of the weight tensor (quantised), may compute something else.
    """
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


def packed_layers(model: torch.nn.Module) -> list[PackedLayer]:
    return [module for module in model.modules() if isinstance(module, PackedLayer)]


# The names of the context's limit in configurations.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
UNLIMITED_TOKENS = 1 << 17


def context_limit(model: PreTrainedModel) -> int:
    """The longest text that the model supports, in tokens; UNLIMITED_TOKENS if its configuration names no limit.

    Layers of Llama 4 attend within chunks of a text. Attention here does not end at chunks, so the first one is the limit.
    """
    config = model.config.get_text_config()
    chunk = config.attention_chunk_size if "chunked_attention" in (getattr(config, "layer_types", None) or ()) else None
    found = (getattr(config, name, None) for name in CONTEXT_NAMES)
    limit = next((limit for limit in found if isinstance(limit, int) and limit > 0), UNLIMITED_TOKENS)
    return min(limit, chunk or limit)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer, by the model's generation config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def text_modules(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The modules that compute texts: all but those that read pictures."""
    if getattr(model.config, "vision_config", None) is None:
        return torch.nn.ModuleList([model])
    return torch.nn.ModuleList(each for each in (model.get_decoder(), model.get_output_embeddings()) if each is not None)


def weight_size(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes and number of the weights that a step reads: all but the embedding table, unless the head shares it."""
    modules = text_modules(model)
    parameters = list(modules.parameters())  # without repetitions
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is None or isinstance(head, PackedLayer) or table is not head.weight:
        parameters = [parameter for parameter in parameters if parameter is not table]
    layers = packed_layers(modules)
    size = sum(map(stored_bytes, parameters)) + sum(layer.nbytes for layer in layers)
    return size, sum(map(torch.numel, parameters)) + sum(layer.in_features * layer.out_features for layer in layers)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, or of a quantised tensor's parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The data type of keys and values: the model's, or the one that its configuration names where weights are packed."""
    return cast(torch.dtype, model.config.dtype) if packed_layers(model) and model.config.dtype else model.dtype
