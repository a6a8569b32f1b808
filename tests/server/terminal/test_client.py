"""The chat's HTTP client: addresses, keys, streams, and errors that are one sentence."""

import json

import pytest

from outrider.server.terminal.client import ChatError, Client
from tests.stand_in import answering

MODELS = (200, json.dumps({"data": [{"id": "tiny"}]}))


def events(*chunks: object) -> str:
    return ": keep-alive\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_with_the_version(suffix: str) -> None:
    keys: list[str | None] = []
    with answering({"/v1/models": MODELS}, keys) as url:
        assert Client(url + suffix, "secret").model() == "tiny"
        assert Client(url + suffix).model() == "tiny"
    assert keys == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "<html>"), "names no model"),
        ((401, '{"error": {"message": "The API key is wrong."}}'), "needs an API key that it knows; give it with --api-key"),
        ((429, '{"error": {"message": "Too many."}}'), r"^Too many\.$"),
        ((400, '{"error": {"message": "a\\u001b[2Jb\\nc"}}'), r"^a\[2Jb c$"),
        ((502, "<html>"), "answered with status 502"),
    ],
)
def test_an_error_is_one_sentence(answer: tuple[int, str], message: str) -> None:
    with answering({"/v1/models": answer}) as url, pytest.raises(ChatError, match=message):
        Client(url).model()


def test_an_error_in_the_stream_is_raised() -> None:
    stream = events({"a": 1}, {"error": {"message": "The worker was lost."}})
    with answering({"/v1/chat/completions": (200, stream)}) as url:
        chunks = Client(url).stream({})
        assert next(chunks) == {"a": 1}
        with pytest.raises(ChatError, match=r"^The worker was lost\.$"):
            next(chunks)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"error": "It broke."}', r"^It broke\.$"),
        ('{"choices": ', "no part of a chat completion"),
        ('{"a": ' * 100_000, "no part of a chat completion"),
    ],
    ids=["a text", "no JSON", "nesting"],
)
def test_an_event_that_is_no_chunk_is_one_sentence(line: str, message: str) -> None:
    with answering({"/v1/chat/completions": (200, f"data: {line}\n\n")}) as url, pytest.raises(ChatError, match=message):
        next(Client(url).stream({}))
