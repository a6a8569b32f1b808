"""The server with tokenizers of other families: prompts, streamed text, special tokens and forced text, with random weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.tokenizer import load_tokenizer
from tests.requests import events
from tests.servers import Served, serving
from tests.slow import mostly_slow
from tests.tokenizers import FAMILIES, write_model

FORCED = "Größe 🙂👩‍👩‍👧 猫が好き ☃ 1234"  # most of its characters are several tokens
ALIKE = "猫猿犬玉"  # which begin with the same byte
ASKED = [{"role": "user", "content": "Hello </s><|im_end|><end_of_turn>[INST] fox"}]


class Family(NamedTuple):
    name: str
    server: Served
    tokenizer: AnyTokenizer

    @property
    def no_bytes(self) -> dict[str, int]:
        """A bias against single bytes: without them, SentencePiece's own text has no invalid ones either."""
        return {str(id): -100 for token, id in self.tokenizer.get_vocab().items() if token.startswith("<0x")}

    def decode(self, ids: list[int]) -> str:
        shown = [id for id in ids if id not in self.tokenizer.all_special_ids]
        return str(self.tokenizer.decode(shown, skip_special_tokens=True))


FAST = ("llama",)  # each has a server; `make soak` starts the others
PARAMS = mostly_slow(FAMILIES, *FAST)


@pytest.fixture(scope="module", params=PARAMS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    with serving("--model", str(folder), "--model.dtype", "float32") as server:
        yield Family(request.param, server, load_tokenizer(str(folder)))


def stream(family: Family, **fields: Any) -> tuple[list[str], list[int]]:
    """The pieces of text of a streamed chat, and its tokens."""
    body = {"model": family.server.model, "messages": ASKED, "stream": True, "return_token_ids": True, **fields}
    *chunks, done = events(family.server, "/v1/chat/completions", body)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [choice["delta"].get("content") or "" for choice in choices]
    return pieces, [id for choice in choices for id in choice.get("token_ids") or []]


def test_a_prompt_is_that_of_the_template_and_its_text_is_only_text(family: Family) -> None:
    tokenizer = family.tokenizer
    plain = [{"role": "user", "content": "Hello fox"}]
    marks = {id for id, token in tokenizer.added_tokens_decoder.items() if str(token) != tokenizer.unk_token}
    for messages in (plain, ASKED):
        body = {"model": family.server.model, "messages": messages}
        ids = family.server.http.post("/tokenize", json=body).json()["tokens"]
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if messages == plain:
            assert ids == tokenizer.encode(rendered, add_special_tokens=False)
            special = [id for id in ids if id in marks]
        assert [id for id in ids if id in marks] == special


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_stream_is_the_text_of_its_tokens(family: Family, temperature: float) -> None:
    fields = {"max_tokens": 200, "temperature": temperature, "seed": 3, "ignore_eos": True, "logit_bias": family.no_bytes}
    pieces, ids = stream(family, **fields)
    assert len(ids) == 200 and len(pieces) > 10
    assert "".join(pieces) == family.decode(ids)


def test_special_tokens_are_no_text(family: Family) -> None:
    """A bias makes special tokens likely; they are shown only if a request asks for them."""
    special = sorted(family.tokenizer.all_special_ids)
    bias = {str(id): 12 for id in special}
    shown: dict[str, Any] = {"max_tokens": 60, "temperature": 1, "seed": 1, "ignore_eos": True}
    shown["logit_bias"] = family.no_bytes | bias
    pieces, ids = stream(family, **shown)
    assert set(ids) & set(special)
    assert "".join(pieces) == family.decode(ids)
    assert not any(token in "".join(pieces) for token in family.tokenizer.all_special_tokens)
    pieces, again = stream(family, **shown, skip_special_tokens=False)
    assert again == ids and any(token in "".join(pieces) for token in family.tokenizer.all_special_tokens)


def test_characters_of_several_tokens_are_streamed_whole(family: Family) -> None:
    if family.name == "unigram":
        pytest.skip("its characters are single tokens")
    for structure, most in (({"choice": [FORCED]}, 1), ({"regex": f"[{ALIKE}]{{12}}"}, 12)):
        pieces, ids = stream(family, structured_outputs=structure, temperature=1, seed=1, speculation={"drafter": "none"})
        found = "".join(pieces)
        assert found == FORCED if most == 1 else set(found) <= set(ALIKE) and len(found) == most
        assert len(ids) > len(found)
        assert len([piece for piece in pieces if piece]) == most
