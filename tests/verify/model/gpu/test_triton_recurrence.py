"""The kernels of recurrent layers against the plain functions: trees, chains and commits of several streams."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.device_rows import DeviceStates
from outrider.verify.model.gpu.triton_recurrence import KernelRecurrence, enter
from outrider.verify.model.recurrent.rows import Recurrence, Scan, recurrence_of
from outrider.verify.model.recurrent.states import ROWS, RecurrentShape
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.test_triton_attention import random_tree

LAYERS, PADDING = 2, 1


class Layers:
    """The recurrent layers of forwards with random inputs, by the kernels and by the plain functions."""

    def __init__(self, shape: CacheShape, streams: int, seed: int, is_delta: bool = True) -> None:
        assert shape.recurrent is not None
        self.shape, self.is_delta = shape.recurrent, is_delta
        self.generator = torch.Generator().manual_seed(seed)
        self.caches, self.references = ([TensorCache(shape, 1) for _ in range(streams)] for _ in range(2))
        for cache, reference in zip(self.caches, self.references, strict=True):
            assert cache.recurrent is not None and reference.recurrent is not None
            for one, other in zip(
                (cache.recurrent.matrices, cache.recurrent.inputs),
                (reference.recurrent.matrices, reference.recurrent.inputs),
                strict=True,
            ):
                one.copy_(other.copy_(self.noise(*one.shape)))
        self.states = DeviceStates(self.shape, 2 * ROWS)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def rows(self, count: int) -> Scan:
        """Strided as models' tensors are."""
        shape, norm = self.shape, torch.nn.functional.normalize
        queries, keys = (norm(self.noise(count, shape.heads, shape.key_dim), dim=-1).transpose(0, 1) for _ in range(2))
        values = self.noise(count, shape.heads, shape.value_dim).transpose(0, 1)
        decays = -self.noise(count, shape.heads, shape.decay_dim).abs().transpose(0, 1) * 2
        return Scan(queries, keys, values, decays, self.noise(count, shape.heads).sigmoid().t() if self.is_delta else None)

    def agree(self, batches: Sequence[ForwardBatch]) -> bool:
        """Whether both compute the same in a forward of these rows of all streams."""
        count, channels = sum(map(len, batches)), self.shape.channels
        segments = [Segment(*each) for each in zip(self.caches, batches, strict=True)]
        enter([self.states], segments)
        found = KernelRecurrence([self.states])
        expected = recurrence_of([Segment(*each) for each in zip(self.references, batches, strict=True)])
        agreed = []
        for number in range(LAYERS):
            inputs = self.noise(channels, count + PADDING).to(self.shape.dtype).t()
            weight, bias = self.noise(channels, self.shape.window + 1), self.noise(channels)
            agreed.append(
                same(found.convolve(number, inputs, weight, bias), expected.convolve(number, inputs[:count], weight, bias))
            )
            rows = self.rows(count + PADDING)
            plain = self.plain(expected, number, rows.part(slice(count))).transpose(0, 1)
            agreed.append(same(found.scan(number, rows, None).transpose(0, 1), plain))
        return all(agreed)

    def plain(self, recurrence: Recurrence, number: int, rows: Scan) -> torch.Tensor:
        return recurrence.scan(number, rows, lambda *_: pytest.fail("a step is not read in the model's own form"))

    def commit(self, number: int, rows: list[int]) -> None:
        for cache in (self.caches[number], self.references[number]):
            cache.commit(rows)


@pytest.mark.parametrize("decay_dim", [1, 16])
def test_rows_beside_and_behind_change_no_bit(decay_dim: int) -> None:
    """Whether the rows after a stream's first ones are another's, or its own."""
    recurrent = RecurrentShape(LAYERS, 3, 8, LAYERS, 1, 16, 8, decay_dim, torch.float32, DEVICE)
    layers = Layers(CacheShape((), torch.float32, DEVICE, recurrent), 1, 7)
    recurrence, rows = KernelRecurrence([layers.states]), layers.rows(70)

    def found(own: int, count: int) -> torch.Tensor:
        layers.states.set([Segment(layers.caches[0], ForwardBatch.chain(torch.zeros(own, dtype=torch.int64)))])
        return recurrence.scan(0, rows.part(slice(count)), None)[:, :20]

    alone = found(20, 20)
    assert alone.any() and torch.equal(found(20, 70), alone) and torch.equal(found(70, 70), alone)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether rows are equal, and those of padding zero."""
    return torch.allclose(found[: len(expected)], expected, atol=2e-5) and not found[len(expected) :].any()


@pytest.mark.parametrize("kind", ["delta rule", "by channel", pytest.param("state space", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "dims", "window", "dtype"),
    [
        ((1, 3), (1, 16, 8), 3, torch.float32),
        pytest.param((3,), (3, 24, 40), 1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((ROWS, 2), (1, 128, 64), 3, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_trees_equal_the_plain_functions(
    kind: str, sizes: tuple[int, ...], dims: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    """And chains after random paths were committed: some rows in place, some moved, or none."""
    decay_dim = dims[1] if kind == "by channel" else 1
    recurrent = RecurrentShape(LAYERS, window, 300 if sum(sizes) > 4 else 8, LAYERS, *dims, decay_dim, dtype, DEVICE)
    layers = Layers(CacheShape((), dtype, DEVICE, recurrent), len(sizes), sum(sizes), kind != "state space")
    trees = [random_tree(rows, layers.generator) for rows in sizes]
    assert layers.agree(trees)
    for number, tree in enumerate(trees):
        last = int(torch.randint(len(tree), (), generator=layers.generator))
        layers.commit(number, np.flatnonzero(tree.ancestor_mask()[last]).tolist())
    layers.commit(0, [])
    assert layers.agree([ForwardBatch.chain(torch.zeros(rows, dtype=torch.int64)) for rows in sizes])
