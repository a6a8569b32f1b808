"""Triton's interpreter as a GPU: small pages, few programs, and products in which a row's place does not matter."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float, _LangPatchScope

from outrider.verify.model.cache import kv_cache
from outrider.verify.model.gpu import text_work, triton_attention
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.gpu.emulated_devices import Devices, emulated_devices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = 16
PAGE = 64  # the least: a block of keys lies in one page


def dot(_: Any, left: TensorHandle, right: TensorHandle, added: TensorHandle, *__: Any) -> TensorHandle:
    """A product as tensor cores compute it, STEP inputs at a time, in one order at every place; NumPy's BLAS has several."""
    rows, columns = (_convert_float(each.data, each.dtype, tl.float32, None).view(np.float32) for each in (left, right))
    columns, found = np.ascontiguousarray(columns.T), added.data
    for first in range(0, rows.shape[1], STEP):
        inputs = slice(first, first + STEP)
        found = found + np.einsum("rk,ck->rc", rows[:, inputs], columns[:, inputs])
    return TensorHandle(found, added.dtype.scalar)


def patch_once(function: Any) -> Any:
    """Replaces the language's functions by the interpreter's, unless they are: the interpreter does so in every call."""
    languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    return patch_language(function) if any(tl.core.is_builtin(language.load) for language in languages) else _LangPatchScope()


patch_language = interpreter._patch_lang


@pytest.fixture(scope="package", autouse=True)
def emulated_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_TOKENS", PAGE)
        patch.setattr(text_work, "SPLIT_KEYS", PAGE)
        patch.setattr(triton_attention, "PROGRAMS", 4)
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(scope="package")
def tiny_runner(tiny_config: LlamaConfig) -> TorchRunner:
    """A runner without a backend, whose caches are contiguous, on the device that runs the kernels."""
    torch.manual_seed(0)
    return TorchRunner(LlamaForCausalLM(tiny_config).to(DEVICE), started=False)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """So that what is read must have been written; integers are the largest ones."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    with emulated_devices() as found:
        yield found
