"""transformers' `generate` with drafts: the answers of plain `generate`, for any drafter, in trees and in chains."""

from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from outrider.drafters.library import Session
from outrider.engines.transformers import Target, generate

VOCABULARY = 61
ENDS: dict[str, Any] = {"eos_token_id": 7, "bos_token_id": 1, "pad_token_id": 0}
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **ENDS}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, **ENDS
    ),
    "mistral": transformers.MistralConfig(sliding_window=6, **SMALL),  # its cache holds the window alone
    "bloom": transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, **ENDS
    ),
}
TREES = {"llama": True, "gpt2": True, "mistral": False, "bloom": False}
DRAFTERS = ("none", "fusion", "trigram", "lookup")
PROMPT = torch.tensor([[5, 9, 14, 5, 9, 14, 5, 9, 3, 20, 21, 22, 20, 21]])


def build(name: str) -> Any:
    torch.manual_seed(2)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    found = build(request.param)
    found.generation_config.eos_token_id = None
    return found


def answer(model: Any, **options: Any) -> list[int]:
    output = model.generate(PROMPT, **{"max_new_tokens": 60, "do_sample": False} | options)
    tokens: list[int] = output[0, PROMPT.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_answers_are_those_of_plain_generate(model: Any, drafter: str) -> None:
    assert answer(model, custom_generate=generate, drafter=drafter, least=0.0) == answer(model)


@pytest.mark.parametrize("processed", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, {"min_new_tokens": 40}])
def test_logits_are_processed_along_the_path(processed: dict[str, Any]) -> None:
    model = build("llama")
    assert answer(model, custom_generate=generate, least=0.0, **processed) == answer(model, **processed)


def test_a_seed_samples_the_same_with_any_drafter(model: Any) -> None:
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "custom_generate": generate, "seed": 5}
    answers = [answer(model, drafter=drafter, least=0.0, **options) for drafter in DRAFTERS]
    assert answers == [answers[0]] * len(DRAFTERS)
    assert answer(model, **options | {"seed": 6}) != answers[0]


def test_samples_have_the_models_distribution() -> None:
    model = build("llama")
    shares = model(PROMPT).logits[0, -1].detach().softmax(-1)
    torch.manual_seed(1)  # which the seeds are drawn from
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "custom_generate": generate, "session": Session()}
    drawn = [answer(model, **options)[0] for _ in range(400)]
    likeliest = int(shares.argmax())
    expected, found = float(shares[likeliest]), drawn.count(likeliest) / len(drawn)
    assert abs(found - expected) < 4 * (expected * (1 - expected) / len(drawn)) ** 0.5


def steps(monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any) -> list[tuple[bool, int]]:
    """Whether each draft of an answer branched, and its nodes."""
    found: list[tuple[bool, int]] = []
    verify = Target.verify

    def noted(self: Target, token: int, tree: Any) -> torch.Tensor:
        found.append((bool(len(tree)) and int(tree.depths.max()) < len(tree), len(tree)))
        return verify(self, token, tree)

    monkeypatch.setattr(Target, "verify", noted)
    answer(model, custom_generate=generate, **options)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_trees_are_drafted_where_attention_follows_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps(monkeypatch, build(name), nodes=8, least=0.0, eos_token_id=None)
    assert any(branched for branched, _ in found) == TREES[name]
    assert max(size for _, size in found) <= 8
    assert len(found) < 59, "some tokens are accepted"


def test_an_answer_ends_within_an_accepted_path() -> None:
    model = build("llama")
    plain = answer(model, eos_token_id=None)
    end = plain[25]
    assert answer(model, custom_generate=generate, eos_token_id=end, least=0.0) == plain[: plain.index(end) + 1]
    for length in range(1, 12):
        assert answer(model, custom_generate=generate, max_new_tokens=length, eos_token_id=None, least=0.0) == plain[:length]


def test_a_cache_is_continued() -> None:
    model, cache = build("llama"), DynamicCache()
    options = {"past_key_values": cache, "custom_generate": generate, "return_dict_in_generate": True, "eos_token_id": None}
    output = model.generate(PROMPT, max_new_tokens=30, do_sample=False, least=0.0, **options)
    assert output.past_key_values is cache
    assert cache.get_seq_length() == PROMPT.shape[1] + 29
    longer = torch.cat([output.sequences, PROMPT], dim=1)
    continued = model.generate(longer, max_new_tokens=20, do_sample=False, **options).sequences
    assert continued.tolist() == model.generate(longer, max_new_tokens=20, do_sample=False, eos_token_id=None).tolist()


def test_tokens_are_streamed() -> None:
    class Pieces(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.tolist()

        def end(self) -> None:
            self.ended = True

    model, pieces = build("llama"), Pieces()
    assert answer(model, custom_generate=generate, stream_to=pieces) == pieces.tokens
    assert pieces.ended


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": PROMPT.repeat(2, 1)}, "one text at a time"),
        ({"inputs": PROMPT, "attention_mask": (PROMPT != 5).long()}, "without padding"),
        ({"inputs": PROMPT, "num_beams": 2}, "no beams"),
        ({"inputs": PROMPT, "use_cache": False}, "use_cache=True"),
        ({"inputs": PROMPT, "output_scores": True, "return_dict_in_generate": True}, "no scores"),
        ({"inputs": PROMPT, "drafter": "fusoin"}, "There is no drafter 'fusoin'"),
    ],
)
def test_what_it_cannot_do_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build("llama").generate(max_new_tokens=5, custom_generate=generate, **options)


def test_a_cache_that_takes_nothing_back_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1, **ENDS)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="leave out custom_generate"):
        model.generate(PROMPT, max_new_tokens=5, custom_generate=generate)
