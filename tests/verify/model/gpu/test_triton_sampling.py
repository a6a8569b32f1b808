"""The kernel that chooses tokens against `outrider.verify.sampling.sampler`, on a GPU or in Triton's interpreter."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.verify.model.gpu import triton_sampling
from outrider.verify.sampling.device import Ranking
from outrider.verify.sampling.rows import in_place
from outrider.verify.sampling.sampler import choose as choose_on_host
from outrider.verify.sampling.sampler import draw as draw_on_host
from outrider.verify.sampling.topk import likeliest
from outrider.verify.sampling_params import SamplingParams
from tests.verify.model.gpu.conftest import DEVICE


def logits_of(size: int, step: float, dtype: torch.dtype, seed: int, rows: int = 3) -> torch.Tensor:
    """Random logits [M, V], of which many are equal if they are multiples of a `step`; some are -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    logits[1:, ::7] = -torch.inf
    logits[:, size // 2] = 0.0
    return logits.to(dtype)


def check(logits: torch.Tensor, params: SamplingParams, count: int = 1) -> None:
    """The tokens with the best scores are the host's, and what the filters before min-p leave of their probabilities."""
    rows, positions = logits.to(DEVICE), [4, 4, 9]
    tokens, probabilities = (each.cpu() for each in triton_sampling.draw(rows, params, positions, count))
    assert torch.equal(Ranking(rows).sampled(rows, params, positions).cpu(), tokens[:, 0])
    for row, position, ids, found in zip(in_place(logits), positions, tokens, probabilities, strict=True):
        assert int(ids[0]) == choose_on_host(row, params, position)
        expected, shares = map(torch.from_numpy, draw_on_host(row, params, position, count))
        assert torch.equal(ids[shares > 0], expected[shares > 0].int())
        assert params.min_p or torch.allclose(found, shares, atol=1e-5)


@settings(max_examples=3)
@given(
    size=st.sampled_from([1, 5, 97, 4096, 5000]),
    step=st.sampled_from([0.0, 0.125, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_p=st.sampled_from([1e-9, 0.52, 0.93, 1.0]),
        top_k=st.sampled_from([0, 1, 3, 40, 10_000]),
        min_p=st.sampled_from([0.0, 0.1, 0.6]),
        seed=st.integers(0, (1 << 64) - 1),
    ),
    count=st.sampled_from([1, 2, 8]),
)
def test_tokens_equal_the_cpus(size: int, step: float, dtype: torch.dtype, params: SamplingParams, count: int) -> None:
    check(logits_of(size, step, dtype, params.seed % 97), params, count)


@pytest.mark.parametrize(("top_k", "seed"), [(0, 0), (900, 1)])
def test_more_tokens_than_there_is_room_for(top_k: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "LEAST_ROOM", 64)
    check(logits_of(4100, 0.0, torch.bfloat16, seed), SamplingParams(seed=seed, top_k=top_k, top_p=0.9))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("value", "filters"),
    [(torch.inf, {}), (torch.nan, {"top_k": 40}), (-torch.nan, {"top_p": 0.9})],
)
def test_a_row_that_is_not_finite_changes_no_other(value: float, filters: dict[str, Any]) -> None:
    params, rows = SamplingParams(seed=1, **filters), logits_of(9000, 0.0, torch.float32, 5, rows=4).to(DEVICE)
    expected = Ranking(rows).sampled(rows, params, range(4))
    broken = rows.clone()
    broken[3, 5] = value
    ranking = Ranking(broken)
    assert torch.equal(ranking.sampled(broken, params, range(4))[:3], expected[:3])
    assert not ranking.of(broken, 1)[1][3].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, -torch.nan])
def test_what_is_behind_a_row_is_not_among_the_likeliest(value: float) -> None:
    logits = torch.full((2, 9000), value, device=DEVICE)
    assert triton_sampling.likeliest(logits, 8)[0].max() < 9000


def test_streams_are_sampled_together() -> None:
    """Whatever their requests ask for; rows that are not sampled are not read."""
    rows = logits_of(300, 0.0, torch.float32, 5, rows=9).to(DEVICE)
    requests = [SamplingParams(seed=1), SamplingParams(temperature=0), SamplingParams(0.7, 0.9, 40, seed=2)]
    requests.append(SamplingParams(1.5, min_p=0.05, seed=3))
    parts, ranking = rows[1:].split([2, 1, 3, 2]), Ranking(rows[1:], is_shared=True)
    found = [
        ranking.of(part, 1)[0][:, 0] if params.greedy else ranking.sampled(part, params, range(len(part)))
        for part, params in zip(parts, requests, strict=True)
    ]
    ranking.end()
    for tokens, part, params in zip(found, parts, requests, strict=True):
        rows_of_part = in_place(part.cpu())
        assert tokens.tolist() == [choose_on_host(row, params, at) for at, row in enumerate(rows_of_part)]


@settings(max_examples=8)
@given(
    size=st.sampled_from([1, 5, 97, 4096, 9000]),
    step=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    count=st.sampled_from([1, 5, 8]),
    seed=st.integers(0, 99),
)
def test_the_likeliest_tokens(size: int, step: float, dtype: torch.dtype, count: int, seed: int) -> None:
    logits, count = logits_of(size, step, dtype, seed), min(count, size)
    ids, probabilities = (each.cpu() for each in triton_sampling.likeliest(logits.to(DEVICE), count)[:2])
    expected = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    finite = expected.values[:, :count] > 0
    assert torch.equal(ids[finite], expected.indices[:, :count][finite].int())
    assert torch.allclose(probabilities.double(), expected.values[:, :count], atol=1e-5)
    on_host, shares = map(torch.from_numpy, likeliest(in_place(logits), count))
    assert torch.equal(logits.gather(1, on_host.long()), logits.topk(count, -1).values)
    assert all(len(set(row)) == count for row in on_host.tolist())
    assert on_host.dtype == torch.int32 and torch.allclose(shares, probabilities, atol=1e-5)
