"""libtorch's C functions (its stable ABI), through which machine code is an operator that traces call without Python.

Their names and arguments are those of `torch/csrc/inductor/aoti_torch/c/shim.h` and `torch/csrc/stable/c/shim.h`. They are
meant for libraries in C++, not for generated code. Tested with PyTorch 2.13. `tests/verify/model/cpu/test_libtorch.py` fails
if one of them is missing or passes arguments in another way.

Without them, `register` has to raise RuntimeError, with the same loss as without `outrider.verify.model.cpu.llvm`.
`torch.library.custom_op` can call machine code, too, but by Python, and without PyTorch's threads. A library in C++ that
includes PyTorch's headers loses nothing, but needs a compiler when it is installed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from outrider.verify.model.cpu import llvm

NAMESPACE = "outrider"
# The functions that generated code calls, and those that register it.
CALLED = ("aoti_torch_get_data_ptr", "aoti_torch_delete_tensor_object", "torch_parallel_for")
REGISTERING = ("aoti_torch_library_init_impl", "aoti_torch_library_impl")

# What a call shares with its threads, 8 bytes each: addresses, of which that of the bias may be null, and numbers.
TASK = ("ptr weights", "ptr rows", "ptr bias", "ptr out", "i64 count", "i64 inputs", "i64 outputs")

# The operator as PyTorch calls it: with four tensors, which it releases after the last read, and three numbers. In Python:
#
#     task = [data_ptr(each) for each in stack[:4]] + stack[4:7]
#     parallel_for(0, outputs // width, 1, multiply_panels, task)
#     for each in stack[:4]:
#         delete(each)
SCHEMA = "(Tensor weights, Tensor rows, Tensor bias, Tensor(a!) out, int count, int inputs, int outputs) -> ()"
OPERATOR = """
define void @operator(ptr %stack, i64 %arguments, i64 %results) {{
entry:
  %task = alloca [7 x i64]
  br label %tensor
tensor:  ; for index in range(4): task[index] = data_ptr(stack[index])
  %index = phi i64 [0, %entry], [%next_index, %tensor]
  %handle_at = getelementptr i64, ptr %stack, i64 %index
  %handle = load ptr, ptr %handle_at
  %address_at = getelementptr i64, ptr %task, i64 %index
  call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %address_at)
  %next_index = add i64 %index, 1
  %is_tensor = icmp ult i64 %next_index, 4
  br i1 %is_tensor, label %tensor, label %number
number:  ; for place in range(4, 7): task[place] = stack[place]
  %place = phi i64 [4, %tensor], [%next_place, %number]
  %number_at = getelementptr i64, ptr %stack, i64 %place
  %number_value = load i64, ptr %number_at
  %field_at = getelementptr i64, ptr %task, i64 %place
  store i64 %number_value, ptr %field_at
  %next_place = add i64 %place, 1
  %is_number = icmp ult i64 %next_place, 7
  br i1 %is_number, label %number, label %run
run:  ; parallel_for(0, outputs // width, 1, multiply_panels, task), where task[6] is outputs
  %outputs_at = getelementptr i64, ptr %task, i64 6
  %outputs = load i64, ptr %outputs_at
  %panels = udiv i64 %outputs, {width}
  call i32 @torch_parallel_for(i64 0, i64 %panels, i64 1, ptr @multiply_panels, ptr %task)
  br label %release
release:  ; for used in range(4): delete(stack[used])
  %used = phi i64 [0, %run], [%next_used, %release]
  %used_at = getelementptr i64, ptr %stack, i64 %used
  %used_handle = load ptr, ptr %used_at
  call i32 @aoti_torch_delete_tensor_object(ptr %used_handle)
  %next_used = add i64 %used, 1
  %is_used = icmp ult i64 %next_used, 4
  br i1 %is_used, label %release, label %finish
finish:
  ret void
}}
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @torch_parallel_for(i64, i64, i64, ptr, ptr)
"""
FRAGMENT = torch.library.Library(NAMESPACE, "FRAGMENT")
# Machine code and registrations must outlive every call, so they are kept here.
_KEPT: list[Any] = []


def library() -> ctypes.CDLL:
    """libtorch. Raises OSError."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def register(name: str, width: int, source: str) -> None:
    """Compiles `source` and registers it as the operator `name`, for the rest of the process.

    The source defines `@multiply_panels`. A panel has `width` outputs. Raises RuntimeError, AttributeError or OSError if LLVM
    or PyTorch cannot do that here.
    """
    torch_cpu = library()
    start, implement = (getattr(torch_cpu, each) for each in REGISTERING)
    addresses = {each: ctypes.cast(getattr(torch_cpu, each), ctypes.c_void_p).value or 0 for each in CALLED}
    engine, address = llvm.compiled(OPERATOR.format(width=width) + source, addresses, "operator")
    FRAGMENT.define(name + SCHEMA)
    implementation = ctypes.c_void_p()
    start(NAMESPACE.encode(), b"CPU", b"", 0, ctypes.byref(implementation))
    implement(implementation, name.encode(), ctypes.c_void_p(address))
    _KEPT.append((engine, implementation))
