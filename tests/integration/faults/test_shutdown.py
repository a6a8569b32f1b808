"""SIGTERM and SIGHUP: running requests are finished, late ones end with an error; a second signal ends all of them at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from outrider import models
from outrider.server.serve import listen
from tests.requests import ENDLESS, body, streaming
from tests.servers import Served, serving, wait_for_metric, wait_until, worker_of

WAIT_SECONDS = 20


def not_ready(server: Served) -> bool:
    try:
        return httpx.get(f"{server.url}/ready").status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_drain_finishes_running_requests_and_refuses_new_ones(number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored, as by nohup")
    with serving("--model.dtype", "float32", "--server.drain_seconds", "60") as server:
        with streaming(server, max_tokens=400, temperature=1.0, seed=3, ignore_eos=True) as lines:
            server.process.send_signal(number)
            os.kill(worker_of(server), number)  # a terminal that is closed, or a service manager, sends it to all processes
            wait_until(lambda: not_ready(server), 10)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(WAIT_SECONDS) == 0


@pytest.mark.slow
def test_at_the_drain_deadline_the_remaining_requests_end_with_an_error() -> None:
    with (
        serving("--model.dtype", "float32", "--server.drain_seconds", "0.5", "--scheduling.max_active", "1") as server,
        ThreadPoolExecutor() as pool,
    ):
        with streaming(server, **ENDLESS) as lines:
            waiting = pool.submit(server.http.post, "/v1/completions", json=body(server))
            wait_for_metric(server, "outrider_requests_waiting 1.0")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
        refused = waiting.result(WAIT_SECONDS)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        server.process.wait(WAIT_SECONDS)
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    with serving("--model.dtype", "float32", "--server.drain_seconds", "600") as server:
        with streaming(server, **ENDLESS) as lines:
            server.process.send_signal(number)
            wait_until(lambda: not_ready(server))
            assert server.process.poll() is None
            server.process.send_signal(number)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
        server.process.wait(WAIT_SECONDS)
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.slow
def test_a_chat_template_that_loops_for_some_request_delays_no_other_work_and_no_end(tmp_path: Path) -> None:
    folder = shutil.copytree(models.TARGET, tmp_path / "model")
    file = folder / "chat_template.jinja"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    file.write_text("{% if 'forever' in messages[0].content %}" + loop + "{% endif %}" + file.read_text())
    flags = "--model.path", str(folder), "--server.drain_seconds", "1"
    with serving("--model.dtype", "float32", *flags) as server, ThreadPoolExecutor() as pool:
        chat = {"model": server.model, "messages": [{"role": "user", "content": "forever"}]}
        looping = pool.submit(server.http.post, "/v1/chat/completions", json=chat, timeout=60)
        assert server.http.post("/v1/completions", json=body(server, max_tokens=4), timeout=60).status_code == 200
        assert not looping.done()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_SECONDS) == 0
        assert looping.exception() or looping.result().status_code >= 500


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("ending", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_cannot_be_written_stops_neither_the_start_nor_the_end(ending: str) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = f"exec {sys.executable} -m outrider.server.cli serve --port {port} --logging.level debug {ending}"
    process = subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL)

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200
    finally:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0
