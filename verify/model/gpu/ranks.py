"""Tensor parallelism: the weights of a decoder of Llama's kind, cut so that each GPU, a rank, has a part of each layer.

A rank has some heads and their keys and values, some of the feed-forward part's numbers, and some of the vocabulary. Inputs are
cut where a layer's sums are cut on one GPU, too (`outrider.verify.model.gpu.triton_products.split_of`), so the ranks' parts are
one GPU's. After M. Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3. Triton is an optional dependency: import this
module lazily.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise, permutations
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.verify.errors import ModelError
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.gpu.decoder import is_plain
from outrider.verify.model.gpu.forms import GROUP, SPAN
from outrider.verify.model.gpu.projections import has_plain_weights, merge_projections
from outrider.verify.model.gpu.quantized import BlockLinear, Blocks
from outrider.verify.model.gpu.split_linear import INSTEAD, SplitLinear
from outrider.verify.model.gpu.triton_products import TYPES, split_of, use_kernel


def check_ranks(config: Any, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
    """Raises ModelError unless the model of this configuration can be split over the devices."""
    architecture = read_config(config.to_dict())
    if architecture is None or not is_plain(architecture) or dtype not in TYPES:
        raise ModelError(f"Only layers of Llama's kind in bfloat16 or float16 can be split over GPUs; {INSTEAD}.")
    layer, inner = architecture.layers[0], config.get_text_config().intermediate_size
    heads_borders(layer.kv_heads, layer.heads * layer.head_dim, architecture.hidden, len(devices))
    borders(inner, architecture.hidden, len(devices))
    for device, other in permutations(devices, 2):
        if device.type == "cuda" and not torch.cuda.can_device_access_peer(device, other):
            raise ModelError(f"{device} cannot write to the memory of {other}, which layers that are split need; {INSTEAD}.")


def heads_borders(kv_heads: int, inputs: int, outputs: int, ranks: int) -> list[int]:
    """`borders` of the output projection's inputs, which are those of key heads. Raises ModelError."""
    found = borders(inputs, outputs, ranks)
    if kv_heads % ranks or found != [inputs // ranks * rank for rank in range(ranks + 1)]:
        raise ModelError(f"{kv_heads} key heads cannot be divided among {ranks} GPUs; {INSTEAD}, or name fewer.")
    return found


def borders(inputs: int, outputs: int, ranks: int) -> list[int]:
    """Where the inputs of each rank begin, and where the last ones end: whole splits. Raises ModelError."""
    split = split_of(inputs, outputs)
    splits = -(-inputs // split)
    if splits % ranks:
        raise ModelError(
            f"Sums of {inputs} products, which are cut into {splits} parts, cannot be divided among {ranks} GPUs; {INSTEAD}, or"
            " name fewer."
        )
    return [min(inputs, splits // ranks * split * rank) for rank in range(ranks + 1)]


def split_model(model: PreTrainedModel, devices: Sequence[torch.device]) -> None:
    """Splits a model on the host over devices, in place, layer by layer. Raises ModelError."""
    decoder: Any = model.get_decoder()
    ranks, first = len(devices), devices[0]
    for layer in decoder.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        o, down = attention.o_proj, feed_forward.down_proj
        sizes = [getattr(attention, f"{each}_proj").out_features for each in "qkv"]
        heads = heads_borders(sizes[1] // attention.head_dim, o.in_features, o.out_features, ranks)
        inner = borders(down.in_features, down.out_features, ranks)
        merge_projections(layer)
        ends = list(accumulate(sizes))
        qkv = [[share(end - size, size, rank, ranks) for end, size in zip(ends, sizes, strict=True)] for rank in range(ranks)]
        split(attention.q_proj, "product", qkv, devices, False)
        split(attention, "o_proj", ranges(heads), devices, True)
        split(feed_forward.gate_proj, "product", ranges([2 * border for border in inner]), devices, False)
        split(feed_forward, "down_proj", ranges(inner), devices, True)
    [name] = (name for name, each in model.named_children() if each is model.get_output_embeddings())
    size = getattr(model, name).out_features
    split(model, name, [[share(0, size, rank, ranks)] for rank in range(ranks)], devices, False)
    parts = {each for layer in model.modules() if isinstance(layer, SplitLinear) for each in layer.modules()}
    for module in {*model.modules()} - parts:
        if any(each.device != first for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module._apply(partial(torch.Tensor.to, device=first), recurse=False)
    getattr(model, name).tables = [decoder.embed_tokens.weight.data.to(device) for device in devices]


def ranges(places: Sequence[int]) -> list[list[range]]:
    """From each place to before the next one."""
    return [[range(start, end)] for start, end in pairwise(places)]


def share(start: int, size: int, rank: int, ranks: int) -> range:
    """A rank's share of `size` consecutive numbers."""
    return range(start + size * rank // ranks, start + size * (rank + 1) // ranks)


def split(parent: Any, name: str, places: Sequence[Sequence[range]], devices: Sequence[torch.device], by_inputs: bool) -> None:
    """Replaces a layer by its parts on the devices. Raises ModelError if its weights are of other kinds than the kernels'."""
    layer: Any = getattr(parent, name, None)
    if not isinstance(layer, BlockLinear) and not has_plain_weights(layer):
        raise ModelError(f"Layers with this model's kind of quantised weights cannot be split over GPUs; {INSTEAD}.")
    whole, bias = split_of(layer.in_features, layer.out_features), layer.bias
    parts = []
    for own, device in zip(places, devices, strict=True):
        some = None if bias is None or by_inputs else fixed(chosen(bias.data, own).to(device))
        part: Any
        if isinstance(layer, BlockLinear):
            blocks = inputs_of(layer.blocks, own[0]) if by_inputs else outputs_of(layer.blocks, own)
            planes: list[Any] = [None if each is None else each.contiguous().to(device) for each in blocks[1:]]
            part = BlockLinear.of(Blocks(blocks.inputs, *planes), layer.dtype, some)
            part.weights = part.weights._replace(split=whole)
        else:
            weight = chosen(layer.weight.data.T, own).T if by_inputs else chosen(layer.weight.data, own)
            with torch.device("meta"):
                part = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            part.weight, part.bias = fixed(weight.contiguous().to(device)), some
            use_kernel([part])
            part.split = whole
        parts.append(part)
    shared = fixed(bias.data.to(devices[0])) if by_inputs and bias is not None else None
    setattr(parent, name, SplitLinear(parts, places, by_inputs, shared, layer.weight.dtype))


def fixed(weight: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight, requires_grad=False)


def chosen(rows: torch.Tensor, places: Sequence[range]) -> torch.Tensor:
    """Some of the rows, one range after the other."""
    return torch.cat([rows[each.start : each.stop] for each in places])


def outputs_of(blocks: Blocks, places: Sequence[range]) -> Blocks:
    planes: list[Any] = [None if each is None else chosen(each, places) for each in blocks[1:]]
    return Blocks(blocks.inputs, *planes)


def inputs_of(blocks: Blocks, inputs: range) -> Blocks:
    """The blocks of some inputs, whole groups. Raises ModelError if inputs of a factor are torn apart."""
    words, scales, minimums, factors = blocks[1:]
    has_spans = factors is not None and scales.dtype == torch.int8
    if has_spans and inputs.start % SPAN:
        raise ModelError(f"The blocks of this model's weights cannot be divided among so many GPUs; {INSTEAD}.")
    groups = -(-blocks.inputs // GROUP)

    def columns(plane: torch.Tensor) -> torch.Tensor:
        of_group = plane.shape[1] // groups
        return plane[:, inputs.start // GROUP * of_group : -(-inputs.stop // GROUP) * of_group]

    if factors is not None and has_spans:
        factors = factors[:, inputs.start // SPAN : -(-inputs.stop // SPAN)]
    return Blocks(len(inputs), columns(words), columns(scales), None if minimums is None else columns(minimums), factors)
