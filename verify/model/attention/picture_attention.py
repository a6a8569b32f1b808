"""Attention of a picture's rows in a prompt."""

from __future__ import annotations

import torch

from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.pictures import BothWays
from outrider.verify.model.segment import Segment


class PictureAttention(TorchAttention):
    """Attention of a picture's rows: in some models and layers, those of pixels attend to each other in both directions."""

    def __init__(self, segment: Segment, both_ways: BothWays) -> None:
        super().__init__(segment.cache, segment.batch)
        assert segment.picture is not None
        self._is_pixels, self._both_ways = segment.picture.is_pixels, both_ways

    def visible(self, window: int | None) -> torch.Tensor:
        """See `TorchAttention.visible`."""
        causal = super().visible(window)
        if self._both_ways == "none" or (self._both_ways == "windows" and window is None):
            return causal
        return causal | (self._is_pixels[:, None] & self._is_pixels)
