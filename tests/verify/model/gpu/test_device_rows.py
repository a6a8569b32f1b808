"""The inputs of a forward in device memory: rows and their ancestors, streams and their pages."""

from __future__ import annotations

import torch

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.gpu.device_rows import DeviceRows, pieces_of
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.text_work import TextWork

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = CacheShape.uniform(layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
GROUPS = 24  # query heads per key head


def new_inputs() -> DeviceRows:
    return DeviceRows(DEVICE, 72, 4, TextWork(SHAPE, GROUPS, 256, [DEVICE]))


def test_positions_leave_out_what_pictures_before_the_rows_do_not_take() -> None:
    cache, inputs = PagedCache(PagePool(SHAPE, 4), 256), new_inputs()
    cache.fill(40)
    cache.reserve(30)
    inputs.set(list(pieces_of(cache, ForwardBatch.chain(torch.arange(30)), shift=12)), 32)
    assert inputs.positions[:30].tolist() == list(range(28, 58))
    assert inputs.rows[2, :30].tolist() == [40] * 24 + [64] * 6  # places in the text
