"""The library's forward: transformers' logits, and the same bits for a row in a tree, in a prompt and in company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import encode
from outrider.verify.model.cache.shape import KVDtype
from outrider.verify.model.cpu.native.forward import NativeForward
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.load_options import Quantization
from outrider.verify.model.loading import prepare
from outrider.verify.model.quantization import quantize_layers
from outrider.verify.model.segment import Segment
from outrider.verify.model.torch_runner import TorchRunner
from tests.trees import trees
from tests.verify.model.test_architectures import WINDOW, make

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
NAMES = ["llama", "mistral", "qwen2", "qwen3"]
FORMATS = ["float32", "bfloat16", "int8", "int4", "int8 cache", "fp8 cache"]
EIGHT_BITS: tuple[KVDtype, ...] = ("int8", "fp8")


def runner(name: str, form: str = "float32") -> TorchRunner:
    model = make(name, NAME, head_dim=16)
    if form == "bfloat16":
        model.to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
    if form in ("int8", "int4"):
        quantize_layers(model, Quantization("int8" if form == "int8" else "int4"), torch.device("cpu"))
    prepare(model, None)
    kv_dtype: KVDtype = next((each for each in EIGHT_BITS if form == f"{each} cache"), "auto")
    found = TorchRunner(model, pack=True, traced=True, kv_dtype=kv_dtype)
    assert isinstance(found.mode.backend, NativeForward)
    assert found.is_invariant
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    tokens = torch.arange(3, 60)
    plain, ours = make(name, "eager", head_dim=16).eval(), runner(name)
    with torch.inference_mode():
        expected = plain(tokens[None]).logits[0]
    found = ours.forward(ours.new_cache(), ForwardBatch.chain(tokens))
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.fixture(
    scope="module", params=[(name, form) for name in NAMES for form in (FORMATS if name == "qwen3" else FORMATS[:1])]
)
def served(request: pytest.FixtureRequest) -> TorchRunner:
    return runner(*request.param)


@settings(max_examples=12, deadline=None)
@given(tree=trees(nodes=20), length=st.integers(0, 130))
def test_a_path_of_a_tree_has_the_bits_of_single_steps(served: TorchRunner, tree: DraftTree, length: int) -> None:
    cache, other = served.new_cache(), served.new_cache()
    cache.fill(length, torch.Generator().manual_seed(length))
    other.fill(3, torch.Generator().manual_seed(1))
    batch = ForwardBatch.tree(7, tree)
    company = Segment(other, ForwardBatch.chain(torch.arange(5)))
    logits = served.forward_all([company, Segment(cache, batch)])[1].clone()
    path = np.flatnonzero(batch.ancestor_mask()[-1]).tolist()
    for row in path:
        alone = served.forward(cache, ForwardBatch.chain(batch.tokens[row : row + 1]))
        assert torch.equal(alone[0], logits[row])
        cache.length += 1


@pytest.mark.parametrize("cuts", [(1,), (64,), (30, 31, 100)])
def test_a_prompt_in_pieces_has_the_bits_of_the_whole(served: TorchRunner, cuts: tuple[int, ...]) -> None:
    tokens = torch.arange(150) % 90
    cache = served.new_cache()
    whole = served.forward(cache, ForwardBatch.chain(tokens)).clone()
    held = cache.tensor[:, :, :, :150].view(torch.uint8).clone()
    pieces = []
    for start, end in zip((0, *cuts), (*cuts, 150), strict=True):
        pieces.append(served.forward(cache, ForwardBatch.chain(tokens[start:end])).clone())
        cache.length = end
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(cache.tensor[:, :, :, :150].view(torch.uint8), held)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_rows_are_stored_as_the_codec_has_them(kv_dtype: KVDtype) -> None:
    tokens = ForwardBatch.chain(torch.arange(90))
    whole, coded = (found := runner("qwen3")).new_cache(), (other := runner("qwen3", f"{kv_dtype} cache")).new_cache()
    found.forward(whole, tokens)
    other.forward(coded, tokens)
    first = encode(whole.tensor[0], coded.tensor.dtype)  # the first layer, whose input is the same
    assert torch.equal(coded.tensor[0, :, :, :90].view(torch.uint8), first[:, :, :90].view(torch.uint8))


def test_layers_with_a_window_read_no_earlier_rows() -> None:
    each = runner("mistral")
    for rows in (1, 9):
        cache = each.new_cache()
        cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
        cache.length = 50
        expected = each.forward(cache, ForwardBatch.chain(torch.arange(rows))).clone()
        cache.tensor[:, :, :, : 50 - WINDOW + 1] = 1e9
        assert torch.equal(each.forward(cache, ForwardBatch.chain(torch.arange(rows))), expected)


def test_a_segment_without_logits_gives_the_last_rows(served: TorchRunner) -> None:
    batch = ForwardBatch.chain(torch.arange(9))
    whole = served.forward(served.new_cache(), batch).clone()
    last = served.forward(served.new_cache(), batch, logits=False)
    assert torch.equal(last, whole[-1:])
