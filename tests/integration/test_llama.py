"""The server on a file that llama.cpp computes: everything above the forward is as with other backends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.models import packaged
from tests.hub import installed
from tests.integration.real.questions import chat, text
from tests.requests import events
from tests.servers import Served, children, serving

pytest.importorskip("llama_cpp")
pytestmark = [pytest.mark.llama, pytest.mark.xdist_group("llama"), pytest.mark.timeout(600)]
FLAGS = ("--model", packaged.SMOLLM2, "--model.backend", "llama.cpp", "--model.device", "cpu", "--model.context_tokens", "2048")
FRUITS = "Name three fruits."


@pytest.fixture(scope="module")
def llama() -> Iterator[Served]:
    installed()
    with serving(*FLAGS, "--speculation.max_nodes", "12") as server:
        yield server


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_version_says_what_computes_and_what_it_does_not_promise(llama: Served) -> None:
    version = llama.http.get("/version").json()
    assert version["kernels"].startswith("llama.cpp (llama-cpp-python ") and version["kv_dtype"] == "float16"
    assert version["invariant_rows"].startswith("off: the bits of llama.cpp's logits depend")


def test_no_process_loads_torch(llama: Served) -> None:
    """The other tests of this server have sampled, drafted, and followed grammars without it."""
    helpers = children(llama.process.pid)
    assert helpers
    for pid in (llama.process.pid, *helpers):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_answers_streams_and_messages(llama: Served) -> None:
    answer = chat(llama, FRUITS)
    assert answer["choices"][0]["finish_reason"] == "stop" and "<|" not in text(answer)
    assert text(answer).count("\n") >= 2
    body = {"model": llama.model, "messages": [{"role": "user", "content": FRUITS}], "temperature": 0, "stream": True}
    *chunks, done = events(llama, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text(answer)
    anthropic: Any = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=llama.url, api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": FRUITS}]
        message = client.messages.create(model=llama.model, messages=messages, max_tokens=40, extra_body={"temperature": 0})
    assert message.content[0].text == text(answer)


def test_sessions_are_continued_and_forked(llama: Served) -> None:
    first = chat(llama, FRUITS, session_id="one")
    history = [{"role": "user", "content": FRUITS}, {"role": "assistant", "content": text(first)}]
    second = chat(llama, "And three more?", session_id="one", messages=history, max_tokens=40)
    assert cached(second) >= first["usage"]["prompt_tokens"]
    shared = "You are given a long list. " + ", ".join(f"item {number}" for number in range(100))
    fields: dict[str, Any] = {"messages": [{"role": "system", "content": shared}], "max_tokens": 8}
    assert cached(chat(llama, FRUITS, **fields)) < 100
    forked = chat(llama, "Name a colour.", **fields)
    assert 200 < cached(forked) < forked["usage"]["prompt_tokens"] - 4
