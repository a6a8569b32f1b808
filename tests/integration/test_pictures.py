"""Models that read pictures, in a real server: their answers are those of transformers."""

import base64
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from outrider.server.pictures.preparer import load_processor, open_picture
from tests.server.pictures.models import WRITERS, picture, write_qwen
from tests.servers import Served, serving

TOKENS = 24
# transformers and the server both load a model for half a minute.
pytestmark = pytest.mark.slow


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def user(*parts: str | bytes) -> dict[str, Any]:
    """A message of texts and pictures."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def ask(served: Served, model: str, messages: list[dict[str, Any]], **fields: Any) -> Any:
    body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    return served.http.post("/v1/chat/completions", json=body | fields)


def said(response: Any) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@cache
def loaded(folder: Path) -> tuple[Any, Any, Any]:
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, load_processor(str(folder), model.config.model_type, tokenizer, {})


def expected(folder: Path, messages: list[dict[str, Any]], pictures: list[bytes]) -> str:
    """What transformers answers, by the processor on the whole prompt and `generate`."""
    model, tokenizer, processor = loaded(folder)
    plain = [
        message
        if isinstance(message["content"], str)
        else message | {"content": [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]}
        for message in messages
    ]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    images = {"images": [open_picture(each) for each in pictures]} if pictures else {}
    inputs = processor(text=[text], add_special_tokens=False, return_tensors="pt", **images)
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return str(tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen"
    write_qwen(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving("--model", str(folder), "--speculation.max_nodes", "16") as served:
        yield served


def test_answers_are_those_of_transformers(served: Served, folder: Path) -> None:
    """In one conversation, whose pictures are read once."""
    first, second, other = picture(1), picture(2, 64, 160), picture(3)
    asked = user("Which of ", first, " and ", second, "?")
    answer = ask(served, "qwen", [asked])
    assert said(answer) == expected(folder, [asked], [first, second])
    turns = [asked, {"role": "assistant", "content": said(answer)}, user("And ", other, "?")]
    later = ask(served, "qwen", turns)
    assert said(later) == expected(folder, turns, [first, second, other])
    usage = answer.json()["usage"], later.json()["usage"]
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] >= usage[0]["prompt_tokens"]
    assert "x-outrider-ignored" not in later.headers


def test_sampled_and_drafted_answers_are_the_same(served: Served) -> None:
    messages = [user("What is ", picture(4), "?")]
    drafters = ({"drafter": "none"}, {"drafter": "fusion"}, {"drafter": "lookup"})
    answers = {said(ask(served, "qwen", messages, temperature=0.8, seed=7, speculation=each)) for each in drafters}
    assert len(answers) == 1


def test_other_protocols_and_tool_results(served: Served, folder: Path) -> None:
    import anthropic  # takes a second

    file = picture(5)
    answer = expected(folder, [user("What is ", file)], [file])
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}
    block: Any = {"type": "image", "source": source}
    asked: dict[str, Any] = {"model": "qwen", "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
        turn: Any = {"role": "user", "content": [{"type": "text", "text": "What is "}, block]}
        raw = client.messages.with_raw_response.create(**asked, messages=[turn])
        assert raw.parse().content[0].text == answer and "x-outrider-ignored" not in raw.headers
        calls: Any = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]},
        ]
        tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
        counts = [
            client.messages.count_tokens(model="qwen", tools=tools, messages=turns)
            for turns in (calls, [*calls[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}])
        ]
        assert counts[0].input_tokens > counts[1].input_tokens + 5
    parts: Any = [{"type": "input_text", "text": "What is "}, {"type": "input_image", "image_url": data_url(file)}]
    response = served.client.responses.create(
        model="qwen", input=[{"role": "user", "content": parts}], max_output_tokens=TOKENS, temperature=0
    )
    assert response.output_text == answer
    following = served.client.responses.create(
        model="qwen", input="And now?", previous_response_id=response.id, max_output_tokens=TOKENS, temperature=0
    )
    turns = [user("What is ", file), {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    assert following.output_text == expected(folder, turns, [file])


def test_a_text_that_spells_a_picture_is_a_text(served: Served, folder: Path) -> None:
    spelled = [user("<|vision_start|><|image_pad|><|vision_end|> What is ", picture(6), "?")]
    answer = ask(served, "qwen", spelled)
    assert answer.status_code == 200
    plain = ask(served, "qwen", [user(" What is ", picture(6), "?")])
    assert answer.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"] + 3


def test_families(tmp_path: Path) -> None:
    """Line breaks that become one token with the text before them, tiles, and templates that take parts only."""
    for name, write in WRITERS.items():
        write(tmp_path / name)
    file, other = picture(1), picture(2, 128, 96)
    with serving("--models.paths", json.dumps([str(tmp_path)]), "--speculation.max_nodes", "16") as served:
        for name in WRITERS:
            for asked, pictures in (
                ([user("What is\n", file, "?")], [file]),
                ([user(file, other)], [file, other]),
                ([user("Hello.")], []),
            ):
                assert said(ask(served, name, asked)) == expected(tmp_path / name, asked, pictures), name
