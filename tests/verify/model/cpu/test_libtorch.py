"""libtorch's C functions exist in the installed version, and pass arguments to machine code in their order."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.model.cpu.libtorch import CALLED, REGISTERING, library, register

# for index in range(begin, end): out[index] = weights[index] * count + rows[index] * inputs + bias[0]
CODE = """
define void @multiply_panels(i64 %begin, i64 %end, ptr %task) {
entry:
  %weights = load ptr, ptr %task
  %rows_at = getelementptr i64, ptr %task, i64 1
  %rows = load ptr, ptr %rows_at
  %bias_at = getelementptr i64, ptr %task, i64 2
  %bias = load ptr, ptr %bias_at
  %out_at = getelementptr i64, ptr %task, i64 3
  %out = load ptr, ptr %out_at
  %count_at = getelementptr i64, ptr %task, i64 4
  %count = load i64, ptr %count_at
  %inputs_at = getelementptr i64, ptr %task, i64 5
  %inputs = load i64, ptr %inputs_at
  %added = load i64, ptr %bias
  br label %panel
panel:
  %index = phi i64 [%begin, %entry], [%next, %panel]
  %weight_at = getelementptr i64, ptr %weights, i64 %index
  %weight = load i64, ptr %weight_at
  %row_at = getelementptr i64, ptr %rows, i64 %index
  %row = load i64, ptr %row_at
  %first = mul i64 %weight, %count
  %second = mul i64 %row, %inputs
  %both = add i64 %first, %second
  %sum = add i64 %both, %added
  %place = getelementptr i64, ptr %out, i64 %index
  store i64 %sum, ptr %place
  %next = add i64 %index, 1
  %is_left = icmp ult i64 %next, %end
  br i1 %is_left, label %panel, label %finish
finish:
  ret void
}
"""


@pytest.mark.parametrize("name", [*CALLED, *REGISTERING])
def test_the_functions_are_there(name: str) -> None:
    here = f"the libtorch of PyTorch {torch.__version__}; libtorch.py says what to use instead."
    assert hasattr(library(), name), f"There is no function {name} in {here}"


def test_an_operator_gets_its_arguments_and_writes_its_output() -> None:
    if not hasattr(torch.ops.outrider, "test_arguments"):
        register("test_arguments", 2, CODE)
    weights, rows = torch.arange(10), torch.arange(100, 110)
    out = torch.zeros(10, dtype=torch.int64)
    torch.ops.outrider.test_arguments(weights, rows, torch.tensor([7]), out, 3, 5, 20)  # 20 outputs in panels of 2
    assert torch.equal(out, 3 * weights + 5 * rows + 7)
