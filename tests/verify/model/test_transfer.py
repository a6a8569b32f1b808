"""Copies between host and device, to and from a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.verify.model.transfer import Download, to_device

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_an_upload_keeps_values_and_dtype() -> None:
    for dtype in (torch.int64, torch.float32, torch.bool):
        tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
        found = to_device(tensor, DEVICE)
        assert found.device.type == DEVICE.type
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), tensor)


@pytest.mark.parametrize("device", [CPU, DEVICE])
def test_arrays_keep_shape_dtype_and_values(device: torch.device) -> None:
    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    shares = torch.linspace(-1, 1, 4)
    empty = torch.empty(4, 0)
    mixed = (ids.to(device), shares, empty.to(device), shares.to(device))
    found = Download(*mixed).arrays()
    for array, tensor in zip(found, (ids, shares, empty, shares), strict=True):
        assert array.shape == tuple(tensor.shape)
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())
