"""A tokenizer of files is transformers' own; turns end as the template says; a draft model's may differ in few tokens."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outrider import models
from outrider.verify.draft_model.shared_ids import SharedIds, find_differences
from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import AnyTokenizer, FastTokenizer
from outrider.verify.gguf.tokenizer import build_tokenizer
from outrider.verify.tokenizer import load_by_transformers, load_tokenizer, stop_ids
from outrider.verify.turns import tokens_after_answer, tokens_within_answer
from tests.hub import MODEL, cache_models
from tests.tokenizers import CHATML, LETTERS, MERGES, PLAIN, bpe, write_qwen


def test_a_revision_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bpe(LETTERS, *MERGES).save_pretrained(tmp_path / "other")
    shutil.copy(models.TARGET / "config.json", tmp_path / "other")
    cache_models(monkeypatch, tmp_path, {"main": models.TARGET, "v1": tmp_path / "other"})
    assert load_tokenizer(MODEL, revision="v1").get_vocab() == LETTERS
    with pytest.raises(ModelError, match=MODEL):
        load_tokenizer(MODEL, revision="v2")


TEXTS = ["Hello world,  what's new?\n\n\tNaïve e\u0301 日本語 1234", "  a ? b  ", ""]
TEXTS += ["<|im_start|>user\n<tool_call> x </tool_call><|im_end|>\n<|endoftext|><extra> <odd> y"]
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", {"__type": "AddedToken"}
TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
ODD: Mapping[str, Any] = {**TOKEN, "content": "<odd>", "lstrip": True, "rstrip": True}
# The files beside tokenizer.json that are not as `write_qwen` has them.
CASES: Mapping[str, dict[str, Any]] = {
    "as it is": {},
    "no configuration": {CONFIG: {}},
    "an older map": {
        CONFIG: {"eos_token": "<|endoftext|>", "chat_template": CHATML},
        MAP: {"eos_token": "<|im_end|>", "bos_token": ODD, "additional_special_tokens": ["<extra>"]},
    },
    "a map that does not count": {
        CONFIG: {"eos_token": "<|im_end|>", "added_tokens_decoder": {"403": {**ODD, "content": "<tool_call>"}}},
        MAP: {"eos_token": "<|endoftext|>"},
    },
    "tokens with roles of their own": {
        CONFIG: {"eos_token": ADDED | TOKEN | {"content": "<|im_end|>"}, "image_token": "<tool_call>"}
        | {"extra_special_tokens": {"odd_token": "<odd>"}}
    },
    "further tokens": {CONFIG: {"additional_special_tokens": ["<extra>", {**ADDED, **ODD}], "pad_token": "<pad>"}},
    "tokens at the ends": {CONFIG: {"add_bos_token": True, "bos_token": "<|im_start|>"}},
    "several templates": {
        CONFIG: {"chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": PLAIN}]}
    },
    "a template of its own": {"chat_template.jinja": PLAIN},
    "templates of their own": {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": CHATML},
}


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_qwen(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "additional_chat_templates").mkdir()
    given = {"tokenizer_config.json": json.loads((tmp_path / "tokenizer_config.json").read_text()), **CASES[request.param]}
    given["tokenizer_config.json"] |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in given.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def check(folder: Path) -> None:
    ours, theirs = load_tokenizer(str(folder)), load_by_transformers(str(folder))
    assert isinstance(ours, FastTokenizer) and not isinstance(theirs, FastTokenizer)
    for name in ("special_tokens_map", "all_special_tokens", "all_special_ids", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert [*map(repr, ours.added_tokens_decoder.values())] == [*map(repr, theirs.added_tokens_decoder.values())]
    for text in TEXTS:
        for options in ({}, {"add_special_tokens": False}, {"split_special_tokens": True}):
            assert ours.encode(text, **options) == theirs.encode(text, **options)
        for skips in (True, False):
            assert ours.decode(ours.encode(text), skips) == theirs.decode(ours.encode(text), skips)
    if ours.chat_template is not None:
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            given: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
            messages = [{"role": "user", "content": "hi"}]
            assert ours.apply_chat_template(messages, **given) == theirs.apply_chat_template(messages, **given)


def test_it_is_the_tokenizer_of_transformers(folder: Path) -> None:
    check(folder)


@pytest.mark.parametrize("path", [models.TARGET, models.DRAFT])
def test_the_embedded_tokenizers(path: Path) -> None:
    check(path)


def test_what_is_added_and_cut_is_as_the_file_says(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    start = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", start)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = load_tokenizer(str(tmp_path)).encode("Hello world, what's new?")
    assert ids[0] == start and 3 < len(ids) < 100
    assert ids == load_by_transformers(str(tmp_path)).encode("Hello world, what's new?")


def test_the_template_of_older_picture_models_is_read(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert load_tokenizer(str(tmp_path)).chat_template == PLAIN


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}'])
def test_a_damaged_file_is_one_sentence(content: str, tmp_path: Path) -> None:
    write_qwen(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"^The tokenizer of '.*' does not load \(.*\); download it again, or name another"):
        load_tokenizer(str(tmp_path))


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


UNUSED, NORMAL, CONTROL = 5, 1, 3


def with_added(*tokens: str) -> AnyTokenizer:
    tokenizer = bpe(LETTERS, *MERGES)
    tokenizer.add_tokens([AddedToken(each, special=True) for each in tokens])
    return tokenizer


def of_file(*added: str, padding: int = 0) -> AnyTokenizer:
    """A file's tokenizer, whose converter has padded the vocabulary."""
    names = [*LETTERS, *added, *(f"[PAD{len(LETTERS) + len(added) + i}]" for i in range(padding))]
    types = [NORMAL] * len(LETTERS) + [CONTROL] * len(added) + [UNUSED] * padding
    entries = {"model": "gpt2", "pre": "gpt-2", "tokens": names, "token_type": types, "merges": ["a b", "b c"]}
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in entries.items()}, "file")


def test_the_embedded_pair_shares_all_ids() -> None:
    assert find_differences(load_tokenizer(str(models.TARGET)), load_tokenizer(str(models.DRAFT))) == {}


def test_the_first_difference_is_named() -> None:
    target = bpe(LETTERS, *MERGES)
    assert find_differences(target, bpe(LETTERS, *MERGES)) == {}
    swapped = {**LETTERS, "ab": 4, "bc": 3}
    with pytest.raises(ModelError, match="token 3 is 'ab' for the target and is 'bc' for the draft; choose"):
        find_differences(target, bpe(swapped, *MERGES))
    with pytest.raises(ModelError, match="token 5 does not exist for the target and is 'd' for the draft"):
        find_differences(target, bpe({**LETTERS, "d": 5}, *MERGES))
    with pytest.raises(ModelError, match="merge 0 is"):
        find_differences(target, bpe(LETTERS, *reversed(MERGES)))
    with pytest.raises(ModelError, match=r"merge 1 is .* and None for the draft"):
        find_differences(target, bpe(LETTERS, MERGES[0]))


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (with_added("<x>", "abc"), with_added("<x>"), {6: 3}),  # the target's newer token is read as "ab", its first one
        (with_added("<x>"), with_added("<x>", "<y>"), {6: 0}),  # the target has none with this id
        (with_added("<x>", "<y>"), with_added("<y>", "<x>"), {5: 6, 6: 5}),  # read as the token of the same name
        (with_added("<x>", "<ab>"), with_added("<z>", "<y>"), {5: 0, 6: 3}),  # "<" and "x" are unknown here
        (with_added("<x>"), of_file("<x>", padding=3), {6: 0, 7: 0, 8: 0}),
        (of_file("<x>", "<ab>", padding=1), of_file("<x>", padding=2), {6: 3}),
    ],
)
def test_added_tokens_and_padding_may_differ(target: AnyTokenizer, draft: AnyTokenizer, expected: dict[int, int]) -> None:
    assert find_differences(target, draft) == expected


def test_what_is_read_and_drafted() -> None:
    ids = SharedIds(9, 7, {2: 4, 5: 8, 8: 1})
    assert ids.own.tolist() == [0, 1, 4, 3, 4, 0, 6, 0, 1]  # ids that the draft model has not are read as its first
    drafted = ids.drafted(np.zeros((2, 7), np.float32))
    assert np.isneginf(np.asarray(drafted)).tolist() == [[False, False, True, False, False, True, False]] * 2
    assert SharedIds(5, 7, {}).drafted(np.zeros((1, 7), np.float32)).shape == (1, 5)
