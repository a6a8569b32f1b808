"""Modules that hold packed weights in place of a model's linear layers and embedding table.

The model can still be called: the check at load compares the forward of machine code with transformers' own over these modules.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.weights import Kind, Weights, product
from outrider.verify.model.packed import PackedLayer, is_plain

# The kind by the data type of the checkpoint. Other types are converted to float32.
KINDS = {torch.bfloat16: Kind.BFLOAT16}


@torch.library.custom_op("outrider::multiply_packed", mutates_args=())
def multiply_packed(rows: torch.Tensor, packed: torch.Tensor, shape: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`product` for traces. `shape` has the weights' kind, outputs and inputs."""
    kind, outputs, inputs = shape.tolist()
    return product(Engine.shared(), Kind(kind), outputs, inputs, packed, rows, bias)


def multiply(rows: torch.Tensor, packed: torch.Tensor, shape: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., inputs] to [..., outputs]. Scriptable."""
    found: torch.Tensor = torch.ops.outrider.multiply_packed(rows, packed, shape, bias)
    return found


class NativeLinear(PackedLayer):
    """A linear layer with packed weights. With quantised weights, blocks of each row are rounded to 8 bits."""

    kernel = "compiled library"

    def __init__(self, linear: torch.nn.Linear, weights: Weights) -> None:
        super().__init__(multiply, linear, weights.data)
        self.weights = weights
        self.constants = (torch.tensor([weights.kind, weights.outputs, weights.inputs]),)
        self.bias = None if linear.bias is None else torch.nn.Parameter(linear.bias.detach().float(), requires_grad=False)
        self.nbytes = weights.nbytes
        self.is_quantized = weights.kind.is_quantized


class NativeEmbedding(torch.nn.Module):
    """An embedding table with packed weights."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)  # models read its dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Float32 [..., hidden]."""
        return self.weights.unpack(tokens)


def pack_model(model: PreTrainedModel, engine: Engine) -> None:
    """Packs every linear layer and the embedding table in place, in the checkpoint's precision; all else becomes float32.

    Layers that are packed already, because they are quantised, stay. A head that is tied to the table shares its weights.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = is_plain(head) and head.weight is table.weight
    for name, module in list(model.named_modules()):
        if is_plain(module) and not (is_tied and module is head):
            model.set_submodule(name, NativeLinear(module, packed(module.weight, engine)))
    if isinstance(table, torch.nn.Embedding):
        weights = packed(table.weight, engine)
        if is_tied and isinstance(head, torch.nn.Linear):
            model.set_output_embeddings(NativeLinear(head, weights))
        model.set_input_embeddings(NativeEmbedding(weights))
    model.float()


def packed(weight: torch.Tensor, engine: Engine) -> Weights:
    """The weights of a tensor, not rounded."""
    kind = KINDS.get(weight.dtype, Kind.FLOAT32)
    return Weights.of(engine, kind if kind.fits(weight.shape[1]) else Kind.FLOAT32, weight.detach())
