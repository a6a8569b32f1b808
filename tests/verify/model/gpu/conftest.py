"""Triton's interpreter as a GPU: small pages, few programs, and products in which a row's place does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from verify.model import cache
from verify.model.gpu import triton_attention

PAGE = 64  # the least: a block of keys lies in one page


def dot(_: Any, left: TensorHandle, right: TensorHandle, added: TensorHandle, *__: Any) -> TensorHandle:
    """A product row by row: the interpreter's BLAS sums a row in another order at another place, and takes no bfloat16."""
    rows, columns = (_convert_float(each.data, each.dtype, tl.float32, None).view(np.float32) for each in (left, right))
    return TensorHandle(np.stack([row @ columns for row in rows]) + added.data, added.dtype.scalar)


@pytest.fixture(scope="package", autouse=True)
def emulated_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PAGE_TOKENS", PAGE)
        patch.setattr(triton_attention, "SPLIT_KEYS", PAGE)
        patch.setattr(triton_attention, "PROGRAMS", 4)
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
