"""LoRA adapters over HTTP: peft's tokens, beside each other and with drafts; sessions of their own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import models
from outrider.verify.model.cpu.native.library import compiled_library
from tests.adapters import save_adapter
from tests.servers import Served, serving

pytestmark = [pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled"), pytest.mark.slow]
PROMPT = "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write_file("
TOKENS = 24


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The folders of two adapters, and the tokens that transformers and peft generate."""
    folder = tmp_path_factory.mktemp("adapters")
    prompt = AutoTokenizer.from_pretrained(models.TARGET)(PROMPT, return_tensors="pt")
    found: dict[str, Any] = {"folder": folder}
    for seed, (name, rank) in enumerate({models.NAME: 0, "one": 8, "two": 3}.items()):
        model = AutoModelForCausalLM.from_pretrained(models.TARGET, dtype=torch.float32).eval()
        if rank:
            model = save_adapter(model, folder / name, rank, seed=seed)
        generated = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
        found[name] = generated[0, prompt["input_ids"].shape[1] :].tolist()
    return found


@pytest.fixture(scope="module")
def adapted(expected: dict[str, Any]) -> Iterator[Served]:
    adapters = [flag for name in ("one", "two") for flag in (f"--model.adapters.{name}", str(expected["folder"] / name))]
    with serving("--model.dtype", "float32", "--speculation.max_nodes", "16", *adapters) as served:
        yield served


def complete(served: Served, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **fields}
    return served.http.post("/v1/completions", json=body)


def tokens(answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_answers_are_those_of_peft(adapted: Served, expected: dict[str, Any]) -> None:
    names = [models.NAME, "one", "two"]
    assert len({tuple(expected[name]) for name in names}) == 3
    for name in names:
        answer = complete(adapted, name)
        assert tokens(answer) == expected[name] and answer.json()["model"] == name
    assert tokens(complete(adapted, models.NAME, lora="two")) == expected["two"]


def test_requests_of_several_adapters_run_at_once(adapted: Served, expected: dict[str, Any]) -> None:
    names = [models.NAME, "one", "two"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: tokens(complete(adapted, name)), names))
    for name, answer in zip(names, answers, strict=True):
        assert answer == expected[name]


def test_adapters_share_no_session(adapted: Served, expected: dict[str, Any]) -> None:
    """A prompt that one adapter has read is read again by another one, whether its session is named or found by its text."""
    prompt = PROMPT * 3
    for session in ({"session_id": "s"}, {}):
        for name, cached in (("one", False), ("two", False), ("one", True), (models.NAME, False), ("two", True)):
            fields = {"prompt": f"# {session}\n{prompt}", **session}
            details = complete(adapted, name, **fields).json()["usage"]["prompt_tokens_details"]
            assert (details["cached_tokens"] > 0) == cached, (session, name)
