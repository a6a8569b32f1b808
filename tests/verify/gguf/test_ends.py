"""The ends of answers in GGUF files of many families: those of their models' generation_config.json."""

from typing import Any, NamedTuple

import pytest

from outrider.verify.gguf.tokenizer import build_tokenizer
from outrider.verify.gguf.vocabulary import BYTE, CONTROL, NORMAL, USER_DEFINED
from outrider.verify.tokenizer import stop_ids


def turns(text: str) -> str:
    """A template whose turns are this text, with ROLE and TEXT in it."""
    parts = text.replace("ROLE", "{{ m.role }}").replace("TEXT", "{{ m.content }}")
    return f"{{% for m in messages %}}{parts}{{% endfor %}}"


CHATML = turns("<|im_start|>ROLE\nTEXT<|im_end|>\n")
GEMMA = turns("<start_of_turn>ROLE\nTEXT<end_of_turn>\n")
NEMOTRON = (
    turns(
        "<SPECIAL_11>ROLE\nTEXT\n<SPECIAL_12>\n"
        "{% if m.tool_calls %}<SPECIAL_11>ROLE\n{{ m.tool_calls }}<SPECIAL_12>\n{% endif %}"
    )
    + "{% if add_generation_prompt %}<SPECIAL_11>assistant\n<think>\n{% endif %}"
)
MISTRAL = turns("{% if m.role == 'user' %}[INST]TEXT[/INST]{% else %} TEXT</s>{% endif %}")
DEEPSEEK = turns("<｜ROLE｜>TEXT{% if m.role != 'user' %}<｜end▁of▁sentence｜>{% endif %}")  # noqa: RUF001
HARMONY = turns(
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>ROLE<|channel|>final<|message|>TEXT<|end|>"
)
SOLAR = turns(
    "{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}<|begin|>ROLE<|content|>TEXT<|end|>"
)


class Family(NamedTuple):
    named: str  # what the file names as its end
    ends: str  # what generation_config.json names
    template: str | None
    others: str = ""  # special tokens that end nothing


FAMILIES = {
    "Qwen 2.5": Family("<|im_end|>", "<|im_end|> <|endoftext|>", CHATML, "<|im_start|> <|fim_pad|>"),
    "Qwen's base": Family("<|endoftext|>", "<|im_end|> <|endoftext|>", CHATML, "<|im_start|>"),
    "Llama 3": Family(
        "<|eot_id|>",
        "<|end_of_text|> <|eom_id|> <|eot_id|>",
        turns("<|start_header_id|>ROLE<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"),
        "<|start_header_id|> <|end_header_id|> <|python_tag|>",
    ),
    "Phi 3": Family(
        "<|endoftext|>", "<|endoftext|> <|assistant|> <|end|>", turns("<|ROLE|>\nTEXT<|end|>\n"), "<|user|> <|system|>"
    ),
    "Phi 4": Family("<|im_end|>", "<|endoftext|> <|im_end|>", CHATML, "<|im_start|> <|im_sep|>"),
    "Gemma 3": Family("<eos>", "<eos> <end_of_turn>", GEMMA, "<bos> <start_of_turn>"),
    "Gemma 4": Family(
        "<eos>", "<eos> <turn|> <|tool_response>", turns("<|turn>ROLE\nTEXT<turn|>\n"), "<bos> <|turn> <tool_response|>"
    ),
    "GLM 4": Family(
        "<|endoftext|>",
        "<|endoftext|> <|user|> <|observation|>",
        turns("<|ROLE|>\nTEXT"),
        "[gMASK] <sop> <|assistant|> <|system|>",
    ),
    "MiniMax M2": Family("<|endoftext|>", "<|endoftext|> [e~[", turns("]~b]ROLE\nTEXT[e~[\n"), "]~b]"),
    "Command R": Family(
        "<EOS_TOKEN>",
        "<EOS_TOKEN> <|END_OF_TURN_TOKEN|>",
        turns("<|START_OF_TURN_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>"),
        "<|START_OF_TURN_TOKEN|>",
    ),
    "EXAONE": Family(
        "<|endoftext|>", "<|endoftext|> [|endofturn|]", turns("[|ROLE|]TEXT[|endofturn|]\n"), "[|user|] [|assistant|]"
    ),
    "Kimi K2": Family(
        "[EOS]",
        "[EOS] <|im_end|>",
        turns("<|im_ROLE|>ROLE<|im_middle|>TEXT<|im_end|>"),
        "<|im_user|> <|im_assistant|> <|im_middle|>",
    ),
    "Nemotron Nano 2": Family("</s>", "</s> <SPECIAL_12>", NEMOTRON, "<SPECIAL_11> <think>"),
    "Grok 2": Family("<|eos|>", "<|eos|> <|separator|>", turns("ROLE: TEXT<|separator|>\n\n")),
    "Seed-OSS": Family("<seed:eos>", "<seed:eos>", turns("<seed:bos>ROLE\nTEXT<seed:eos>"), "<seed:bos>"),
    "Ling": Family("<|endoftext|>", "<|endoftext|> <|role_end|>", turns("<role>ROLE</role>TEXT<|role_end|>"), "<role> </role>"),
    "Mistral": Family("</s>", "</s>", MISTRAL, "<s> [INST] [/INST]"),
    "DeepSeek": Family("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEPSEEK, "<｜user｜> <｜assistant｜>"),  # noqa: RUF001
    "Apertus": Family(
        "</s>",
        "</s> <|assistant_end|>",
        turns("<|ROLE_start|>TEXT<|ROLE_end|>"),
        "<|user_start|> <|user_end|> <|assistant_start|>",
    ),
    "InternLM 2": Family("</s>", "</s> <|im_end|>", CHATML, "<|im_start|>"),
    "SmolVLM": Family("<|im_end|>", "<|im_end|> <end_of_utterance>", CHATML, "<|im_start|>"),
    "gpt-oss": Family(
        "<|return|>", "<|return|> <|endoftext|> <|call|>", HARMONY, "<|end|> <|start|> <|channel|> <|message|> <|assistant|>"
    ),
    "gpt-oss without a template": Family("<|return|>", "<|return|> <|call|>", None, "<|end|> <|start|>"),
    "Solar Open": Family("<|flush|>", "<|flush|> <|calls|>", SOLAR, "<|end|> <|begin|> <|think|> <|content|>"),
    "no special tokens": Family("<|endoftext|>", "<|endoftext|>", turns("ROLE: TEXT\n\n")),
}


def entries_for(family: Family, kind: int = CONTROL, **others: Any) -> dict[str, Any]:
    special = dict.fromkeys([family.named, *family.ends.split(), *family.others.split()])
    tokens = [*special, "a", "b", "ab"]
    types = [kind] * len(special) + [NORMAL] * 3
    given = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": ["a b"], "eos_token_id": 0, **others}
    template = {} if family.template is None else {"tokenizer.chat_template": family.template}
    return {f"tokenizer.ggml.{name}": value for name, value in given.items()} | template


def ends_of(entries: dict[str, Any]) -> set[str]:
    tokenizer = build_tokenizer(entries, "x.gguf")
    return set(tokenizer.convert_ids_to_tokens(sorted(stop_ids(frozenset(), tokenizer))))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_are_those_of_the_published_model(family: str) -> None:
    given = FAMILIES[family]
    assert ends_of(entries_for(given)) == set(given.ends.split())


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if "</s>" not in family.ends])
def test_tokens_of_the_user_end_answers_too(family: str) -> None:
    given = FAMILIES[family]
    assert ends_of(entries_for(given, USER_DEFINED)) == set(given.ends.split())


@pytest.mark.parametrize("kind", [NORMAL, BYTE])
def test_ordinary_tokens_with_such_a_text_end_nothing(kind: int) -> None:
    family = Family("<|return|>", "<|endoftext|> </s> <|im_end|> <|end|>", None)
    assert ends_of(entries_for(family, kind)) == {"<|return|>"}


def test_a_tag_of_html_is_no_end() -> None:
    family = Family("<eos>", "<eos>", GEMMA, "</s> <b>")
    assert ends_of(entries_for(family, USER_DEFINED)) == {"<eos>"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"eot_token_id": 1}, {"<x>", "<y>"}),
        ({"eom_token_id": 2}, {"<x>", "<z>"}),
        ({"eos_token_ids": [1, 2]}, {"<x>", "<y>", "<z>"}),
        ({"eos_token_id": [0, 2]}, {"<x>", "<z>"}),
        ({"eot_token_id": 6, "eom_token_id": 4294967295, "eos_token_ids": [-1, 1]}, {"<x>", "<y>"}),
    ],
)
def test_keys_name_ends(keys: dict[str, Any], expected: set[str]) -> None:
    assert ends_of(entries_for(Family("<x>", "<x>", None, "<y> <z>"), **keys)) == expected
