"""The runner of transformers' models: streams in one forward, the weights of a step, and models that are refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment, grouped
from outrider.verify.model.kwarg_injector import NotPassedOn
from outrider.verify.model.sizes import weight_size
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build


def chain(*tokens: int) -> ForwardBatch:
    return ForwardBatch.chain(torch.tensor(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_leave_out_the_embedding_table_unless_it_is_the_head(tiny_config: LlamaConfig, tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**tiny_config.to_dict(), "tie_word_embeddings": tied}))
    layers = sum(parameter.nbytes for parameter in model.model.layers.parameters()) + model.model.norm.weight.nbytes
    assert weight_size(model) == (layers + 97 * 32 * 4, layers // 4 + 97 * 32)


def test_a_model_with_another_attention_is_refused(tiny_config: LlamaConfig) -> None:
    model = LlamaForCausalLM(tiny_config)
    model.config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="cannot be served"):
        TorchRunner(model)
    model.config._attn_implementation = NAME
    TorchRunner(model)


STREAMS = ((3, 4), (0, 1), (70, 9), (20, 30))  # tokens of text and rows of each stream


def test_streams_share_a_forward(tiny_config: LlamaConfig) -> None:
    runner = TorchRunner(LlamaForCausalLM(tiny_config), pack=True, started=False)
    runner.start(200)
    for joint in (STREAMS[:2], STREAMS, STREAMS[::-1]):
        segments, expected = [], []
        for text, count in joint:
            cache = runner.new_cache()
            cache.tensor.normal_(generator=torch.Generator().manual_seed(text))
            cache.length = text
            batch = chain(*range(5, 5 + count))
            expected.append((runner.forward(cache, batch).clone(), cache.tensor.clone()))
            cache.tensor[:, :, :, text : text + count] = 0
            segments.append(Segment(cache, batch))
        found = runner.forward_all(segments)
        for logits, segment, (alone, written) in zip(found, segments, expected, strict=True):
            end = segment.cache.length + segment.rows
            assert torch.allclose(logits, alone, atol=1e-4)
            assert torch.allclose(segment.cache.tensor[:, :, :, :end], written[:, :, :, :end], atol=1e-5)


def test_a_model_that_passes_nothing_on_is_served() -> None:
    model = build("stablelm", NAME)
    with pytest.raises(NotPassedOn, match="to its attention layers"):
        model(torch.tensor([[5]]), attention=1)
    runner = TorchRunner(model)
    assert runner.forward(runner.new_cache(), ForwardBatch.chain(torch.tensor([5, 6]))).shape == (2, 97)


def test_streams_are_computed_together_up_to_the_limits(tiny_runner: TorchRunner) -> None:
    segments = [Segment(tiny_runner.new_cache(), chain(*range(rows))) for rows in (30, 20, 5, 1)]
    for limits, sizes in (((1024,), [4]), ((40,), [1, 3]), ((1024, 3), [3, 1]), ((10,), [1, 1, 2])):
        groups = grouped(segments, *limits)
        assert [each for group in groups for each in group] == segments
        assert [len(group) for group in groups] == sizes
