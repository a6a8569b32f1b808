"""The Triton kernels against the plain torch reference, on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import STORED, noise_like
from outrider.verify.model.cache.shape import CacheShape, KVDtype, LayerShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu import text_work
from outrider.verify.model.gpu.device_rows import DeviceRows, pieces_of
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool, PoolPart, by_plane, together
from outrider.verify.model.gpu.text_work import FLOAT32_BLOCKS, HOPPER_BLOCKS, TextWork
from outrider.verify.model.gpu.triton_attention import KernelAttention

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE_ROWS = 16  # larger cases are soak tests
MOST_POSITIONS = 1100

# heads, kv_heads, (rows and length of each stream), widths of keys and values, window, softcap, sinks
Case = tuple[int, int, tuple[tuple[int, int], ...], int | tuple[int, int], int | None, float | None, bool]
CASES: list[Case] = [
    (4, 2, ((1, 0),), 64, None, None, False),  # the very first token
    (4, 2, ((3, 64), (1, 3), (2, 130)), 64, None, None, False),  # whole pages, and streams without whole blocks
    (8, 1, ((5, 333),), 80, None, None, False),
    (8, 2, ((129, 300), (3, 60)), 96, None, None, False),  # the largest tree, and a tree across the end of a block
    (4, 4, ((17, 1000),), 128, 64, None, False),
    (2, 1, ((2, 140),), 256, None, None, False),
    (4, 1, ((4, 77),), 80, 10, 30.0, False),
    (4, 2, ((6, 5),), 32, 2, None, True),  # the window is shorter than the tree is deep
    (3, 3, ((3, 130), (1, 3)), (48, 12), None, None, False),  # as latent attention has
]
ALL: list[tuple[KVDtype, Case]] = [
    *(("auto", case) for case in CASES),
    ("int8", CASES[1]),
    ("int8", CASES[6]),
    ("int8", CASES[8]),
    ("fp8", CASES[6]),
]
# In the interpreter alone: on a GPU, the blocks of Hopper are for 16 bits, and float32 does not fit into its shared memory.
ON_HOPPER: list[tuple[KVDtype, Case]] = [("auto", CASES[1]), ("int8", CASES[3]), ("auto", CASES[6])]


def random_tree(rows: int, generator: torch.Generator) -> ForwardBatch:
    """A tree with random parents; its tokens are zero."""
    ancestors = np.eye(rows, dtype=np.bool_)
    for row in range(1, rows):
        ancestors[row] |= ancestors[int(torch.randint(max(0, row - 6), row, (1,), generator=generator))]
    return ForwardBatch(np.zeros(rows, np.int64), ancestors.sum(1) - 1, ancestors)


def fill_unwritten(pool: PagePool, caches: Sequence[PagedCache]) -> None:
    """Sets what the caches have not committed to ones, which are NaN in every type and scale."""
    written = torch.zeros(len(pool) * pool.page_tokens, dtype=torch.bool, device=DEVICE)
    for cache in caches:
        written[cache.places(0, cache.length)] = True
    for plane in (plane for part in pool.parts for plane in part.planes):
        plane.view(torch.uint8).movedim(3, 1)[~written.view(len(pool), -1)] = 0xFF


def attend(
    pool: PagePool, streams: Sequence[tuple[PagedCache, ForwardBatch]], layer: Layer, *inputs: torch.Tensor
) -> torch.Tensor:
    """The kernels' attention of all streams' rows from query, keys and values; some rows pad them."""
    count = sum(len(batch) for _, batch in streams)
    padded = [torch.nn.functional.pad(each, (0, 0, 0, 2)) for each in inputs]
    width, groups = max(padded[1].shape[2], padded[2].shape[2]), len(padded[0]) // len(padded[1])
    work = TextWork(width, pool.shape.dtype, groups, MOST_POSITIONS, [DEVICE])
    rows = DeviceRows(DEVICE, 136, len(pool), work)
    rows.set([piece for cache, batch in streams for piece in pieces_of(cache, batch)], count + 2)
    out = KernelAttention(pool, [rows]).attend(layer, padded[0], padded[1], padded[2])
    assert not out[:, count:].any()  # of rows without a stream
    return out[:, :count]


@pytest.mark.parametrize(
    ("case", "kv_dtype", "blocks"),
    [
        pytest.param(case, kv_dtype, blocks, marks=[pytest.mark.slow] if case[2][0][0] > LARGE_ROWS else [])
        for cases, blocks in ((ALL, FLOAT32_BLOCKS), (ON_HOPPER if DEVICE.type == "cpu" else [], HOPPER_BLOCKS))
        for kv_dtype, case in cases
    ],
)
def test_the_kernel_equals_the_reference(
    case: Case, kv_dtype: KVDtype, blocks: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_work, "FLOAT32_BLOCKS", blocks)
    heads, kv_heads, sizes, widths, window, softcap, has_sinks = case
    generator = torch.Generator().manual_seed(heads)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    head_dim, value_dim = widths if isinstance(widths, tuple) else (widths, widths)
    layers = (LayerShape(kv_heads, head_dim, value_dim),) * 2
    shape = replace(CacheShape(layers, torch.float32, DEVICE), coded=STORED[kv_dtype])
    pool = PagePool(shape, 20)
    for part in pool.parts:
        for plane, values in zip(part.planes, by_plane(noise_like(part.tensor, generator), part.planes), strict=True):
            plane.copy_(values)
    layer = Layer(1, head_dim**-0.5, window, softcap, noise(heads) if has_sinks else None)
    count = sum(rows for rows, _ in sizes)
    sizes_of = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    inputs = [noise(count, *size).transpose(0, 1) for size in sizes_of]  # as models do
    streams, references = [], []
    for rows, length in sizes:
        cache, reference = PagedCache(pool, MOST_POSITIONS), TensorCache(shape, MOST_POSITIONS)
        cache.reserve(length + rows)
        cache.table.reverse()
        cache.length = length
        reference.fork(cache, length)
        streams.append((cache, random_tree(rows, generator)))
        references.append(reference)
    fill_unwritten(pool, [cache for cache, _ in streams])
    before = [part.tensor.clone() for part in pool.parts]
    found = attend(pool, streams, layer, *inputs)
    start = 0
    for (cache, batch), reference in zip(streams, references, strict=True):
        end = start + len(batch)
        expected = TorchAttention(reference, batch).attend(layer, *(each[:, start:end] for each in inputs))
        tolerance = 5e-3 if kv_dtype == "fp8" else 2e-5 if softcap is None else 1e-4  # ties may be rounded to the other side
        assert torch.allclose(found[:, start:end], expected, atol=tolerance)
        for at, place in enumerate(cache.places(cache.length, cache.length + len(batch)), cache.length):
            page, row = divmod(place, pool.page_tokens)
            for planes, stored in zip(pool.layers[1], reference.layers[1], strict=True):
                written = together([plane[page, :, row] for plane in planes]).cpu().view(torch.uint8).numpy()
                assert (written == stored[:, at]).mean() >= (0.98 if kv_dtype == "fp8" else 1.0)
            for part, old in zip(pool.parts, before, strict=True):
                mine = old.shape[1] // 2  # the first plane of the second layer
                for plane, unchanged in zip(part.planes, PoolPart(old).planes, strict=True):
                    plane[page, mine:, :, row] = unchanged[page, mine:, :, row]
        start = end
    # The new rows are written, and nothing else.
    for part, old in zip(pool.parts, before, strict=True):
        assert torch.equal(part.tensor.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "length", "window"),
    [
        (2, 1, 4, 70, None),
        pytest.param(4, 2, 5, 203, 70, marks=pytest.mark.slow),
        pytest.param(2, 2, 129, 256, None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_the_others(
    heads: int, kv_heads: int, rows: int, length: int, window: int | None, dtype: torch.dtype
) -> None:
    """In a tree between other streams as token by token."""
    generator = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    shape = CacheShape.uniform(1, kv_heads, 32, dtype, DEVICE)
    pool = PagePool(shape, 30)
    pool.parts[0].tensor[:] = noise(*pool.parts[0].tensor.shape)
    layer, tree = Layer(0, 0.2, window), random_tree(rows, generator)
    caches = [PagedCache(pool, MOST_POSITIONS) for _ in range(3)]
    for cache, text in zip(caches, (30, length, 65), strict=True):
        cache.fill(text)
        cache.reserve(rows)
    for part in caches[1]._contents(length):
        part.copy_(noise(*part.shape))
    inputs = [noise(each, 3 + rows + 2, 32) for each in (heads, kv_heads, kv_heads)]
    beside = [random_tree(3, generator), tree, random_tree(2, generator)]
    together = attend(pool, list(zip(caches, beside, strict=True)), layer, *inputs)[:, 3 : 3 + rows]
    ancestors = tree.ancestor_mask()[int(tree.depths.argmax())]
    for row in np.flatnonzero(ancestors).tolist():
        alone = attend(
            pool,
            [(caches[1], ForwardBatch.chain(torch.zeros(1, dtype=torch.int64)))],
            layer,
            *(each[:, 3 + row : 4 + row] for each in inputs),
        )
        caches[1].length += 1
        assert torch.equal(alone[:, 0], together[:, row])


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("at", [3, 69])  # in a split of the text, and in the row's own block
def test_nan_in_a_key_reaches_the_row(at: int) -> None:
    """So that the server says that the model computed it."""
    pool = PagePool(CacheShape.uniform(1, 1, 32, torch.float32, DEVICE), 2)
    cache = PagedCache(pool, MOST_POSITIONS)
    cache.fill(70)
    cache.reserve(1)
    pool.layers[0][0][0][cache.places(at, at + 1)[0] // pool.page_tokens, 0, at % pool.page_tokens, 5] = torch.nan
    one, ones = ForwardBatch.chain(torch.zeros(1, dtype=torch.int64)), torch.ones(1, 1, 32, device=DEVICE)
    assert attend(pool, [(cache, one)], Layer(0, 0.2), ones, ones, ones).isnan().all()
