"""What a chat template writes after an answer, and within one, for checkpoints as for GGUF files."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outrider import models
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.tokenizer import load_tokenizer, stop_ids
from outrider.verify.turns import tokens_after_answer, tokens_within_answer

SPECIAL = ["<eos>", "<end>", "<user>", "<bot>", "<sep>", "<call>", "\n"]


def tokenizer_with(template: str | dict[str, str] | None) -> AnyTokenizer:
    backend = Tokenizer(BPE({"a": 0}, []))
    backend.add_tokens([AddedToken(text, normalized=False, special=text != "<call>") for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="<eos>")


def texts(tokenizer: AnyTokenizer, ids: frozenset[int]) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(sorted(ids)))


def turns(content: str, opening: str = "<bot>", start: str = "") -> str:
    """A template whose assistant's turn has this content."""
    return (
        f"{start}{{% for m in messages %}}{{% if m.role == 'user' %}}<user>{{{{ m.content }}}}"
        f"{{% else %}}{opening}{content}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


CONTENT = "{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments.value }}</call>{% endfor %}"
THOUGHT = "{% if m.reasoning_content %}{{ m.reasoning_content }}<sep>{% endif %}"


@pytest.mark.parametrize(
    ("template", "after", "within", "ends"),
    [
        (turns(CONTENT + "<end>"), {"<end>"}, set(), {"<eos>", "<end>"}),
        (turns(CONTENT + " \n<end>"), {"<end>"}, set(), {"<eos>", "<end>"}),
        (turns(CONTENT + "{{ eos_token }}"), {"<eos>"}, set(), {"<eos>"}),
        (turns(CONTENT), {"<user>"}, set(), {"<eos>", "<user>"}),
        (turns(CONTENT + ", he said.<end>"), set(), set(), {"<eos>"}),
        (turns(THOUGHT + CONTENT + "<sep>"), {"<sep>"}, {"<sep>"}, {"<eos>"}),
        (turns(THOUGHT + CONTENT + "<end>"), {"<end>"}, {"<sep>"}, {"<eos>", "<end>"}),
        (turns(CONTENT + "<end>" + CALLS), {"<end>"}, {"<end>", "<call>"}, {"<eos>"}),
        (turns(CONTENT + CALLS + "<end>"), {"<end>"}, {"<call>"}, {"<eos>", "<end>"}),
        (turns(CONTENT + "<end>{% if m.tool_calls %}<bot>" + CALLS + "<end>{% endif %}"), {"<end>"}, set(), {"<eos>", "<end>"}),
        (turns("{{ m.content[0].text }}<end>"), {"<end>"}, set(), {"<eos>", "<end>"}),
        (turns(CONTENT + "<end>", start="{{ tools | length }}"), {"<end>"}, set(), {"<eos>", "<end>"}),
        ("{{ raise_exception('no') }}", set(), set(), {"<eos>"}),
        ("{{ messages.nothing.nothing }}", set(), set(), {"<eos>"}),
        ("no messages", set(), set(), {"<eos>"}),
        (None, set(), set(), {"<eos>"}),
        ({"default": turns(CONTENT + "<end>"), "tool_use": turns(CONTENT + "<end>")}, {"<end>"}, set(), {"<eos>", "<end>"}),
        ({"rag": turns(CONTENT + "<end>"), "tool_use": turns(CONTENT + "<end>")}, {"<end>"}, set(), {"<eos>", "<end>"}),
    ],
)
def test_templates(template: Any, after: set[str], within: set[str], ends: set[str]) -> None:
    tokenizer = tokenizer_with(template)
    assert texts(tokenizer, tokens_after_answer(tokenizer)) == after
    assert texts(tokenizer, tokens_within_answer(tokenizer)) == within
    assert texts(tokenizer, stop_ids(frozenset(), tokenizer)) == ends


def test_what_the_model_names_ends_answers_whatever_the_template_says() -> None:
    tokenizer = tokenizer_with(turns(THOUGHT + CONTENT + "<sep>"))
    named = frozenset(tokenizer.convert_tokens_to_ids(["<sep>"]))
    assert texts(tokenizer, stop_ids(named, tokenizer)) == {"<eos>", "<sep>"}


def test_the_embedded_models_template_adds_nothing_that_ends_answers_early() -> None:
    tokenizer = load_tokenizer(str(models.TARGET))
    assert texts(tokenizer, stop_ids(frozenset(), tokenizer)) == {"<|end|>"}
