"""Attention by products of bfloat16: as near to exact attention as torch's own, and the same bits in a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.verify.model.attention import dot_product
from outrider.verify.model.attention.dot_product import chosen, dot_product_attention, fast_attention

SCALING = 0.3
NEVER = 1 << 60
FORMS: dict[str, dict[str, Any]] = {
    "by head": {"is_fast": True, "least_work": 0, "least_keys": 0},
    "together": {"is_fast": True, "least_rows": 0, "least_work": NEVER},
    "by torch": {"is_fast": True, "least_rows": NEVER, "least_work": NEVER},
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


def inputs(
    rows: int, context: int, heads: int = 2, width: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys, values and the mask of a chunk of a prompt."""
    generator = torch.Generator().manual_seed(rows)
    query, keys, values = (
        torch.randn(heads, count, width, generator=generator).bfloat16() for count in (rows, context, context)
    )
    allowed = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
    return 4 * query, keys, values, torch.zeros(rows, context, dtype=torch.bfloat16).masked_fill_(~allowed, -torch.inf)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("rows", "context"), [(1, 40), (7, 300), (40, 40), (600, 700)])
def test_products_are_about_as_exact_as_attention(form: dict[str, Any], rows: int, context: int) -> None:
    query, keys, values, mask = inputs(rows, context)
    exact = dot_product_attention(query.double(), keys.double(), values.double(), mask.double(), SCALING)
    found = dot_product_attention(query, keys, values, mask, SCALING, **form)
    torch_error = error(dot_product_attention(query, keys, values, mask, SCALING, is_fast=False), exact)
    assert error(found, exact) < max(4 * torch_error, 0.008)


def test_large_scores_lose_no_precision(form: dict[str, Any]) -> None:
    query, keys, values, mask = inputs(8, 200)
    keys = keys + 8  # adds about the same to all scores of a row, which changes no weight
    exact = dot_product_attention(query.double(), keys.double(), values.double(), mask.double(), SCALING)
    found = dot_product_attention(query, keys, values, mask, SCALING, **form)
    rounded = ((SCALING * query @ keys.transpose(1, 2)) + mask).softmax(-1) @ values
    assert error(found, exact) < 0.3 * error(rounded, exact)


def test_windows_without_a_sampled_key(form: dict[str, Any]) -> None:
    query, keys, values, mask = inputs(5, 64)
    mask = mask.masked_fill(torch.ones(5, 64, dtype=torch.bool).tril(64 - 5 - 6), -torch.inf)  # the last 6 keys of each row
    assert torch.isinf(mask[:, :: dot_product.SAMPLED]).all(1).any()
    exact = dot_product_attention(query.double(), keys.double(), values.double(), mask.double(), SCALING)
    found = dot_product_attention(query, keys, values, mask, SCALING, **form)
    assert error(found, exact) < 0.02


def test_without_a_mask(form: dict[str, Any]) -> None:
    query, keys, values, _ = inputs(4, 100)
    exact = dot_product_attention(query.double(), keys.double(), values.double(), None, SCALING)
    found = dot_product_attention(query, keys, values, None, SCALING, **form)
    assert error(found, exact) < 0.02


def test_a_script_gives_the_same_bits(form: dict[str, Any]) -> None:
    script = torch.jit.script(dot_product_attention)
    query, keys, values, mask = inputs(9, 130)
    for each in (mask, None):
        assert torch.equal(
            script(query, keys, values, each, SCALING, **form),
            dot_product_attention(query, keys, values, each, SCALING, **form),
        )


CPU = torch.device("cpu")


@pytest.fixture
def has_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has AVX-512's instructions for bfloat16, and no AMX."""
    monkeypatch.setattr(dot_product, "has_amx", lambda: False)
    monkeypatch.setattr(dot_product, "has_bfloat16_vectors", lambda: True)


@pytest.mark.usefixtures("has_vectors")
@pytest.mark.parametrize("is_fast", [True, False])
def test_the_choice_is_timed_once_and_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_fast: bool) -> None:
    expected = fast_attention if is_fast else dot_product_attention
    with monkeypatch.context() as patched:
        patched.setattr(dot_product, "multiplies_fast", lambda threads: is_fast)
        assert chosen(CPU, torch.bfloat16, tmp_path) is expected
        (file,) = tmp_path.iterdir()
        intact = file.read_text()
        for damaged in ("", "{}", '{"choice": 1}', '{"choice": null}'):
            file.write_text(damaged)
            assert chosen(CPU, torch.bfloat16, tmp_path) is expected
            assert file.read_text() == intact
    monkeypatch.setattr(dot_product, "multiplies_fast", lambda threads: pytest.fail("timed again"))
    assert chosen(CPU, torch.bfloat16, tmp_path) is expected


@pytest.mark.usefixtures("has_vectors")
@pytest.mark.parametrize("shorter", [torch.bfloat16, torch.float32])
def test_the_faster_products_are_chosen(monkeypatch: pytest.MonkeyPatch, shorter: torch.dtype) -> None:
    monkeypatch.setattr(dot_product, "shortest_seconds", lambda dtype: 1.0 if dtype == shorter else 2.0)
    assert dot_product.multiplies_fast.__wrapped__(1) == (shorter == torch.bfloat16)


def test_other_machines_and_dtypes_have_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot_product, "multiplies_fast", lambda threads: pytest.fail("timed"))
    monkeypatch.setattr(dot_product, "has_amx", lambda: True)
    found = [
        chosen(CPU, torch.float32, None),
        chosen(CPU, torch.bfloat16, None),
        chosen(torch.device("cuda"), torch.bfloat16, None),
    ]
    assert found == [dot_product_attention] * 3


def test_a_row_alone_is_computed_with_a_copy_of_itself() -> None:
    query, keys, values, mask = inputs(2, 90)
    alone = dot_product_attention(query[:, :1], keys, values, mask[:1], SCALING, is_fast=True)
    twice = dot_product_attention(query[:, :1].repeat(1, 2, 1), keys, values, mask[:1].repeat(2, 1), SCALING, is_fast=False)
    assert torch.equal(alone, twice[:, :1])
