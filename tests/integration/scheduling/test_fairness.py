"""One client's requests do not delay another's: many choices, long prompts, and readers that stand still."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tests.requests import complete, stalled
from tests.servers import ALICE, BOB, Served, wait_for_metric, worker_of

ENDLESS = {"ignore_eos": True, "max_tokens": 1900, "temperature": 1.0, "seed": 1}


def test_many_choices_do_not_delay_another_keys_first_token(guarded: Served) -> None:
    with ExitStack() as stack:
        attacks = []
        for _ in range(4):  # one for each place in the worker
            body = {"model": guarded.model, "prompt": "x = ", "n": 16, "stream": True, **ENDLESS}
            attacks.append(stack.enter_context(guarded.http.stream("POST", "/v1/completions", json=body, timeout=120)))
        lines = [filter(lambda line: line.startswith("data: "), attack.iter_lines()) for attack in attacks]
        for each in lines:
            next(each)
        bob = stack.enter_context(guarded.login(BOB))
        assert complete(bob, max_tokens=1)["usage"]["completion_tokens"] == 1
        for each in lines:  # no attack has come further than its first choice
            assert json.loads(next(each)[6:])["choices"][0]["index"] == 0


def test_a_stalled_reader_holds_no_turn_and_loses_nothing(guarded: Served) -> None:
    options = {**ENDLESS, "max_tokens": 700, "logprobs": 20}  # several kilobytes per token, more than the sockets hold
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
    with stalled(guarded, key=ALICE, logprobs=20, **ENDLESS) as reader, ThreadPoolExecutor() as pool:
        wait_for_metric(guarded, "outrider_requests_running 1.0")
        wait_for_metric(guarded, "outrider_requests_running 0.0")  # the reader's request is paused
        bodies = [{"model": guarded.model, "prompt": "x = ", **ENDLESS, "n": 16, **fields} for fields in work]
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
