"""Modules with weights that are packed for the library: linear layers, and what a draft head uses of its target."""

import torch

from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.weights import Kind, Weights, multiply
from outrider.verify.model.sizes import PackedLayer, is_plain

# How weights of these types are packed.
KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}


class NativeLinear(PackedLayer):
    """A linear layer with packed weights. With quantised weights, blocks of each row are rounded to 8 bits."""

    kernel = "compiled library"

    def __init__(self, linear: torch.nn.Linear, weights: Weights) -> None:
        super().__init__(linear, torch.device("cpu"))
        self.weights, self.nbytes, self.is_quantized = weights, weights.nbytes, weights.kind.is_quantized
        self.bias = None if linear.bias is None else torch.nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return product(rows, self.weights, None if self.bias is None else self.bias.data_ptr()).to(rows.dtype)


class NativeEmbedding(torch.nn.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)  # models read its dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Float32 [..., hidden]."""
        return torch.from_numpy(self.weights.unpack(tokens.numpy()))


class NativeHead(torch.nn.Module):
    """The layer that computes logits, with packed weights."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to float32 [..., outputs]."""
        return product(rows, self.weights)


def product(rows: torch.Tensor, weights: Weights, bias: int | None = None) -> torch.Tensor:
    """[..., inputs] to float32 [..., outputs]; `bias` is the address of float32 [outputs]."""
    values = rows.float().contiguous().view(-1, weights.inputs).numpy()
    found = multiply(Engine.shared(), weights.matrix, values, bias)
    return torch.from_numpy(found).view(*rows.shape[:-1], weights.outputs)


def packed(linear: torch.nn.Linear, kind: Kind) -> NativeLinear:
    """The layer with weights of this kind. Requires `compiled_library`."""
    return NativeLinear(linear, Weights.of(Engine.shared(), kind, linear.weight.detach().float().numpy()))


def pack_layers(model: torch.nn.Module) -> None:
    """Packs the weights of linear layers on a CPU in place, if the library was compiled; other layers stay as they are."""
    if compiled_library() is None:
        return
    for name, module in list(model.named_modules()):
        if is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in KINDS:
            kind = KINDS[module.weight.dtype]
            if kind.fits(module.in_features):
                model.set_submodule(name, packed(module, kind))
