"""Which configurations are those of draft heads; a damaged one is one sentence about the draft model."""

from pathlib import Path
from typing import Any

import pytest

from outrider.verify.errors import ModelError
from outrider.verify.heads.kinds import Kind, find_head, kind_of

CONFIGS: list[tuple[dict[str, Any], Kind | None]] = [
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}, None),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, Kind.ONE_LAYER),
    ({"architectures": ["EagleModel"], "num_hidden_layers": 2}, Kind.EAGLE),
    ({"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, Kind.EAGLE3),
    ({"draft_vocab_size": 5}, Kind.EAGLE3),
    ({"medusa_num_heads": 4}, Kind.MEDUSA),
    ({"model_type": "gemma4_assistant"}, Kind.ASSISTANT),
    ({"architectures": ["DFlashDraftModel"], "num_hidden_layers": 1}, Kind.BLOCK),
    ({"speculators_model_type": "dspark", "draft_vocab_size": 5}, Kind.BLOCK),
    ({}, None),
]


@pytest.mark.parametrize(("config", "kind"), CONFIGS, ids=str)
def test_a_configuration_says_which_head_it_is(config: dict[str, Any], kind: Kind | None) -> None:
    assert kind_of(config) == kind


@pytest.mark.parametrize("content", ['{"a": ', "[]", '{"architectures": 5}', '{"transformer_layer_config": 5}', "\x00"])
def test_a_damaged_configuration_is_the_draft_models(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=f"The draft model at '{tmp_path}' does not load"):
        find_head(str(tmp_path), "main")
