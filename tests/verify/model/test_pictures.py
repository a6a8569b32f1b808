"""Prompts with pictures: answers are those of transformers' own generate, to the token."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.drafters.interface import Ints
from outrider.drafters.registry import Resources, make
from outrider.verify.checkpoint import READERS
from outrider.verify.decode import decode
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.backend import load_model
from outrider.verify.model.cpu.native.layers import NativeLinear
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.pictures import Picture
from outrider.verify.model.sizes import context_limit, text_modules
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.slow import mostly_slow
from tests.verify.model.picture_models import CLOSE, END, FAMILIES, OPEN, PIXELS, VOCABULARY, Family

BEFORE, BETWEEN, AFTER = list(range(5, 25)), list(range(5, 12)), [9, 10, 11]
GREEDY = SamplingParams(temperature=0)
ANSWER = 32
Arguments = Mapping[str, torch.Tensor]


def runner_of(family: Family) -> TorchRunner:
    return TorchRunner(family.model({"": NAME, "text_config": NAME}), 256, pack=True)


def text_of(family: Family, pictures: int) -> tuple[list[int], list[int]]:
    """A prompt with this many pictures, and where they begin."""
    tokens, starts = [*BEFORE], []
    for _ in range(pictures):
        starts.append(len(tokens) + 1)
        tokens += [OPEN, *family.tokens, CLOSE, *BETWEEN]
    return tokens + AFTER, starts


def generated(family: Family, pictures: Sequence[Arguments]) -> list[int]:
    tokens = torch.tensor([text_of(family, len(pictures))[0]])
    types = {family.types: (tokens == PIXELS).int()} if family.types else {}
    found = family.model().generate(
        input_ids=tokens, **family.together(pictures), **types, max_new_tokens=ANSWER, do_sample=False, eos_token_id=END
    )
    return [int(token) for token in found[0, tokens.shape[1] :]]


def marked(family: Family, numbers: Sequence[int]) -> Ints:
    """The prompt with tokens in the place of each picture that depend on its number."""
    tokens, starts = text_of(family, len(numbers))
    for number, start in zip(numbers, starts, strict=True):
        tokens[start : start + len(family.tokens)] = [(13 * number + 7 * i) % 250 for i in range(len(family.tokens))]
    return np.array(tokens, np.int32)


def placed(runner: TorchRunner, family: Family, pictures: Sequence[Arguments]) -> list[Picture]:
    assert runner.pictures is not None
    starts = text_of(family, len(pictures))[1]
    tokens = torch.tensor(family.tokens)
    return [runner.pictures.place(start, tokens, each) for start, each in zip(starts, pictures, strict=True)]


def options(pictures: Sequence[Picture]) -> DecodeOptions:
    return DecodeOptions(GREEDY, ANSWER, frozenset({END}), 16, pictures=pictures)


def test_all_families_that_are_served_are_tested() -> None:
    assert set(FAMILIES) == READERS
    assert all(family.config().model_type == name for name, family in FAMILIES.items())


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "qwen2_5_vl", "smolvlm"))
def test_answers_are_those_of_transformers(name: str) -> None:
    """Two pictures; then, in the same session, the first one and another one, of which only that one is read."""
    family = FAMILIES[name]
    runner = runner_of(family)
    torch.manual_seed(1)
    first, second, third = (family.arguments() for _ in range(3))
    for drafter in ("none", "fusion"):
        verifier, drafting = Verifier(runner, runner.new_cache()), make(drafter, Resources(vocabulary=VOCABULARY))
        answer = decode(verifier, drafting, marked(family, [1, 2]), options(placed(runner, family, [first, second])))
        assert answer.tokens == generated(family, [first, second])
        other = decode(verifier, drafting, marked(family, [1, 3]), options(placed(runner, family, [first, third])))
        assert other.tokens == generated(family, [first, third])
        assert other.tokens != answer.tokens
        known = text_of(family, 2)[1][1]
        assert verifier.begin(marked(family, [1, 2]), GREEDY, 1) == known


def test_a_picture_is_read_in_one_chunk_and_never_continued_inside() -> None:
    family = FAMILIES["qwen2_5_vl"]
    runner = runner_of(family)
    verifier = Verifier(runner, runner.new_cache())
    pictures = placed(runner, family, [family.arguments()])
    verifier.begin(marked(family, [1]), GREEDY, 1, pictures=pictures)
    rows = []
    while (chunk := verifier.chunk(4)) is not None:
        rows.append(chunk.rows)
        verifier.commit_chunk(chunk, runner.forward_all([chunk])[0])
    start, size = pictures[0].start, len(family.tokens)
    assert rows == [4] * (start // 4) + [start % 4] * (start % 4 > 0) + [size] + [4, 4, 2]
    verifier.truncate(start + 4)
    assert verifier.committed_rows == start


def test_pictures_and_texts_of_several_streams_share_a_forward_call() -> None:
    family = FAMILIES["gemma3"]
    runner = runner_of(family)
    arguments = family.arguments()
    alone, beside, text = (Verifier(runner, runner.new_cache()) for _ in range(3))
    for verifier in (alone, beside):
        verifier.begin(marked(family, [1]), GREEDY, 1, pictures=placed(runner, family, [arguments]))
        chunk = verifier.chunk()
        assert chunk is not None
        verifier.commit_chunk(chunk, runner.forward_all([chunk])[0])
    text.begin(np.array(BEFORE, np.int32), GREEDY, 1)
    picture, picture_beside, words = alone.chunk(), beside.chunk(), text.chunk()
    assert picture is not None and picture_beside is not None and words is not None
    expected = runner.forward_all([picture])[0].clone(), runner.forward_all([words])[0].clone()
    found = runner.forward_all([picture_beside, words])
    assert torch.equal(found[0], expected[0]) and torch.allclose(found[1], expected[1], atol=1e-5)


def test_a_context_ends_with_the_first_chunk_of_chunked_attention() -> None:
    assert context_limit(FAMILIES["llama4"].model()) == 256


@pytest.mark.parametrize("name", ["gemma3", "smolvlm"])
def test_a_checkpoint_is_loaded_and_its_text_alone_is_quantised(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.model().save_pretrained(tmp_path)
    runner = load_model(LoadOptions(str(tmp_path), quantize="int8"))
    assert isinstance(runner, TorchRunner) and runner.pictures is not None
    texts = set(text_modules(runner.model).modules())
    packed = {module for module in runner.model.modules() if isinstance(module, NativeLinear) and module.is_quantized}
    assert packed and packed <= texts
    arguments = family.arguments()
    verifier = Verifier(runner, runner.new_cache())
    pictures = placed(runner, family, [arguments])
    answer = decode(verifier, make("none", Resources()), marked(family, [1]), options(pictures))
    assert len(answer.tokens) == ANSWER
