"""A linear layer whose weights are spread over several GPUs."""

from collections.abc import Sequence
from typing import Any, cast

import torch

# How a sentence that refuses a model's split ends.
INSTEAD = "write commas between the devices in model.device"


class SplitLinear(torch.nn.Module):
    """Parts of a layer, one for each rank: of its outputs, or of its inputs.

    `outrider.verify.model.gpu.decoder` computes with the parts; the layer itself is for what transformers computes.
    """

    tables: list[torch.Tensor]  # of the layer that computes logits: the embedding table on each device

    def __init__(
        self,
        parts: Sequence[Any],
        places: Sequence[Sequence[range]],
        by_inputs: bool,
        bias: torch.nn.Parameter | None,
        dtype: torch.dtype,
    ) -> None:
        """Parts have `weights`; `places` are the outputs or inputs of each. By inputs, none has the bias."""
        super().__init__()
        self.parts, self.places, self.by_inputs, self.bias = torch.nn.ModuleList(parts), places, by_inputs, bias
        self.devices = [cast(torch.Tensor, part.weights.values).device for part in parts]
        # Some models ask for its data type and device.
        self.weight = torch.empty(0, dtype=dtype, device=self.devices[0])

    def weights(self, rank: int) -> Any:
        """The `outrider.verify.model.gpu.triton_products.Weights` of a rank; by inputs, each has the whole bias."""
        part: Any = self.parts[rank]
        if not self.by_inputs or self.bias is None:
            return part.weights
        return part.weights._replace(bias=self.bias.to(self.devices[rank]))

    @property
    def splits(self) -> int:
        """The parts of sums by inputs that all ranks compute."""
        parts: Any = self.parts
        return sum(-(-len(own) // part.weights.split) for part, [own] in zip(parts, self.places, strict=True))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs] on the first device to [..., outputs]."""
        outputs = []
        for part, device, own in zip(self.parts, self.devices, self.places, strict=True):
            given = rows[..., own[0].start : own[0].stop] if self.by_inputs else rows
            outputs.append(part(given.to(device)).to(rows.device))
        if self.by_inputs:
            found = torch.stack(outputs).sum(0)
            return found if self.bias is None else found + self.bias
        places = [place for own in self.places for each in own for place in each]
        found = torch.cat(outputs, -1)
        return torch.empty_like(found).index_copy_(-1, torch.tensor(places).to(found.device), found)
