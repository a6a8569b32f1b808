"""Pictures in prompts: rows that the model computes from pixels, by transformers' own forward, in one chunk.

In a session's text, a picture's tokens are those that a digest of the picture gives, so a session is
continued only if its pictures are the same. The forward takes the tokens of the model's own processor instead.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from outrider.verify.checkpoint import READERS
from outrider.verify.model.transfer import to_device

# Layers in which a picture's rows attend to each other in both directions.
BothWays = Literal["none", "windows", "all"]


@dataclass(frozen=True, eq=False)
class Picture:
    start: int  # position of its first token in the text
    tokens: torch.Tensor  # int64 [N]; as the model's processor gives them: those of pixels, and maybe separators
    is_pixels: torch.Tensor  # bool [N]; which tokens stand for pixels
    arguments: Mapping[str, torch.Tensor]  # further arguments of the model's forward, such as pixel_values
    positions: torch.Tensor  # int64 [N], or [3, N] in a grid; relative to the first token's
    advance: int  # the position of the first token behind it, relative to the first token's

    @property
    def end(self) -> int:
        """The position in the text behind its last token."""
        return self.start + len(self.tokens)

    def rows(self, first: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions on a device; the first token's position is `first`."""
        return to_device(self.tokens, device), to_device(self.positions + first, device)

    def pixels(self, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The further arguments on a device, floating-point numbers in this type."""
        arguments = self.arguments.items()
        return {name: to_device(each.to(dtype) if each.is_floating_point() else each, device) for name, each in arguments}


class PictureReader:
    """Properties of a model that reads pictures."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._token = int(getattr(config, "image_token_id", None) or config.image_token_index)
        self._index = getattr(model.base_model, "get_rope_index", None)
        text = config.get_text_config()
        self.both_ways: BothWays = "none"
        if config.model_type == "gemma3":
            self.both_ways = "all"
        elif getattr(text, "use_bidirectional_attention", None) == "vision":
            self.both_ways = "windows"

    def read(self, start: int, tokens: Sequence[int], arrays: Mapping[str, Any]) -> Picture:
        """`place`, from the tokens and further arguments of a message, whose arrays have `dtype`, `shape` and `data`."""
        arguments = {
            name: torch.frombuffer(bytearray(array.data), dtype=getattr(torch, array.dtype)).reshape(array.shape)
            for name, array in arrays.items()
        }
        return self.place(start, torch.tensor(tokens), arguments)

    def place(self, start: int, tokens: torch.Tensor, arguments: Mapping[str, torch.Tensor]) -> Picture:
        """A picture in a text, with its positions: in a grid where the model has such positions, else consecutive ones."""
        is_pixels = tokens == self._token
        if self._index is None:
            return Picture(start, tokens, is_pixels, arguments, torch.arange(len(tokens)), len(tokens))
        known = inspect.signature(self._index).parameters
        given = {name: value for name, value in arguments.items() if name in known}
        found, _ = self._index(tokens[None], mm_token_type_ids=is_pixels[None].int(), **given)
        positions = found[-3:, 0].long()  # some models have those of texts in front of time, height and width
        return Picture(start, tokens, is_pixels, arguments, positions, int(positions.max()) + 1)


def reader_of(model: PreTrainedModel) -> PictureReader | None:
    """The reader of a model's pictures; None if it reads none, or none that were tested."""
    return PictureReader(model) if model.config.model_type in READERS else None
