"""One client's requests neither delay nor change another's; time limits, clients that leave, and a worker that is lost."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.requests import ENDLESS, body, complete, stalled, streaming, text
from tests.servers import ALICE, BOB, PECULIAR, Served, read_metrics, serving, wait_for_metric, worker_of
from tests.slow import mostly_slow

OPTIONS = {"ignore_eos": True, "max_tokens": 1900, "temperature": 1.0, "seed": 1}


def test_many_choices_do_not_delay_another_keys_first_token(guarded: Served) -> None:
    with ExitStack() as stack:
        attacks = []
        for _ in range(4):  # one for each place in the worker
            body = {"model": guarded.model, "prompt": "x = ", "n": 16, "stream": True, **OPTIONS}
            attacks.append(stack.enter_context(guarded.http.stream("POST", "/v1/completions", json=body, timeout=120)))
        lines = [filter(lambda line: line.startswith("data: "), attack.iter_lines()) for attack in attacks]
        for each in lines:
            next(each)
        bob = stack.enter_context(guarded.login(BOB))
        assert complete(bob, max_tokens=1)["usage"]["completion_tokens"] == 1
        for each in lines:  # no attack has come further than its first choice
            assert json.loads(next(each)[6:])["choices"][0]["index"] == 0


def test_a_stalled_reader_holds_no_turn_and_loses_nothing(guarded: Served) -> None:
    options = {**OPTIONS, "max_tokens": 700, "logprobs": 20}  # several kilobytes per token, more than the sockets hold
    with stalled(guarded, key=ALICE, stream_options={"include_usage": True}, **options) as connection:
        wait_for_metric(guarded, "outrider_requests_running 1.0")
        wait_for_metric(guarded, "outrider_requests_running 0.0")  # it pauses, although it has not ended
        assert complete(guarded, max_tokens=1)["usage"]["completion_tokens"] == 1
        received = bytearray()
        while data := connection.recv(1 << 20):
            received += data
    assert b"data: [DONE]" in received
    chunks = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    scores = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    assert sum(len(each["tokens"]) for each in scores if each) == chunks[-1]["usage"]["completion_tokens"] == 700


def test_a_worker_killed_mid_stream_mid_prefill_and_mid_grammar_beside_a_stalled_reader(guarded: Served) -> None:
    """Every request at work ends with an error, and the next one is answered."""
    work: list[dict[str, Any]] = [{"regex": "(ab|cd)*"}, {}, {"prompt": [300] * 1900, "echo": True, "logprobs": 5}]
    with stalled(guarded, key=ALICE, logprobs=20, **OPTIONS) as reader, ThreadPoolExecutor() as pool:
        wait_for_metric(guarded, "outrider_requests_running 1.0")
        wait_for_metric(guarded, "outrider_requests_running 0.0")  # the reader's request is paused
        bodies = [{"model": guarded.model, "prompt": "x = ", **OPTIONS, "n": 16, **fields} for fields in work]
        killed = [pool.submit(guarded.http.post, "/v1/completions", json=body, timeout=120) for body in bodies]
        wait_for_metric(guarded, "outrider_requests_running 3.0")
        os.kill(worker_of(guarded), signal.SIGKILL)
        for each in killed:
            assert each.result().status_code == 503, each.result().text
            assert each.result().json()["error"]["code"] == "worker_unavailable"
        received = bytearray()
        while data := reader.recv(1 << 20):
            received += data
        assert b"The worker was lost" in received and b"[DONE]" not in received
    assert complete(guarded, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.slow
def test_requests_that_wait_or_run_too_long_end_with_an_error() -> None:
    limits = {"max_active": "1", "queue_seconds": "0.5", "request_seconds": "2"}
    flags = [word for name, value in limits.items() for word in (f"--scheduling.{name}", value)]
    with serving("--model.dtype", "float32", *flags) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(server.http.post, "/v1/completions", json=body(server, **ENDLESS))
        wait_for_metric(server, "outrider_requests_running 1.0")
        waited = server.http.post("/v1/completions", json=body(server, max_tokens=1))
        for answer, limit in ((waited, "within 0.5 s"), (running.result(30), "within 2 s")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_exceeded")
            assert limit in answer.json()["error"]["message"]
        assert int(waited.headers["Retry-After"]) >= 1
        refused = re.search(r'outrider_rejected_requests_total{reason="deadline"} (\S+)', read_metrics(server))
        assert refused and float(refused[1]) >= 2
        assert complete(server, max_tokens=3)["choices"]  # the slot is free again


def test_a_disconnect_frees_the_worker(served: Served) -> None:
    with streaming(served, **ENDLESS):
        pass
    with pytest.raises(httpx.ReadTimeout):  # a client that gives up on a JSON answer
        served.http.post("/v1/completions", json=body(served, **ENDLESS), timeout=0.3)
    wait_for_metric(served, "outrider_requests_running 0.0")  # in far less time than the two answers take
    assert text(complete(served, max_tokens=2))


PROMPT = f"{PECULIAR}\n\n" * 6


@pytest.mark.parametrize("drafter", mostly_slow(["fusion", "trigram", "lookup", "lookahead"], "fusion"))
def test_drafters_do_not_learn_across_keys(guarded: Served, drafter: str) -> None:
    """Same session id, same prompt, another key: steps, drafts and cached tokens are those of a fresh server."""
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.3, "seed": 1, "session_id": f"shared {drafter}"}
    chosen = {"speculation": {"drafter": drafter, "report": True, "max_nodes": 24}}

    def steps(key: str, **more: Any) -> tuple[Any, ...]:
        content, headers = body(guarded, max_tokens=80) | fields | chosen | more, {"Authorization": f"Bearer {key}"}
        found = guarded.http.post("/v1/completions", json=content, headers=headers).raise_for_status().json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["text"], found["speculation"], cached

    fresh = steps(BOB, session_id=f"never used before {drafter}")
    for _ in range(3):
        cached_answer = steps(ALICE)
    assert cached_answer[2] > 0  # Alice's second request reused her session
    after = steps(BOB)
    assert after == fresh
    again = steps(BOB)
    assert again[2] > 0  # and Bob's reused his
