"""The application and its start: routes, keys, states and errors; failures are one sentence and leave no process."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from outrider import models
from outrider.server import serve
from outrider.server.engine.messages import Ready
from outrider.server.serve import check_address, listen
from outrider.server.settings import SettingsError, load_settings
from tests.server.fakes import FakeEngine, app_with, fetch
from tests.slow import mostly_slow

KEY = "a-key-of-some-length"
OPEN_PATHS = {"/health", "/v1/health", "/ready", "/version", "/metrics"}


def test_all_routes_except_status_routes_need_a_key() -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": KEY})
    paths: dict[str, Any] = fetch(app, "GET", "/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()["paths"]
    assert len(paths) >= 12 and set(paths) > OPEN_PATHS
    for path, operations in (paths | {"/openapi.json": ["get"], "/nothing": ["get"]}).items():
        for method in operations:
            body = {"prompt": "x", "messages": [], "input": "x", "tokens": []} if method == "post" else None
            response = fetch(app, method.upper(), path.format(identity="x", name="x"), body)
            assert (response.status_code != 401) == (path in OPEN_PATHS), path
    answer = fetch(app, "POST", "/v1/completions", {"prompt": "x"}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["choices"][0]["text"] == "a"


def test_status_routes() -> None:
    engine = FakeEngine()
    app = app_with(engine)
    assert fetch(app, "GET", "/health").json() == {"status": "ok"}
    assert fetch(app, "GET", "/ready").json() == {"status": "ready"}
    assert fetch(app, "GET", "/version").json()["version"]
    engine.ready, engine.state, engine.failure = False, "failed", "No model."
    response = fetch(app, "GET", "/ready")
    assert (response.status_code, response.json()) == (503, {"status": "failed", "detail": "No model."})
    response = fetch(app, "GET", "/health")  # so that an orchestrator restarts the server
    assert (response.status_code, response.json()) == (503, {"status": "failed", "detail": "No model."})
    assert 'outrider_requests_total{endpoint="/ready",status="503"} 1.0' in fetch(app, "GET", "/metrics").text


@pytest.mark.parametrize("kernels", ["", "linear layers: oneDNN; attention: PyTorch"])
def test_the_version_names_the_chosen_kernels(kernels: str) -> None:
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(asyncio.run(engine.wait_started()), kernels=kernels, alone=kernels and "1-1, 4-7")
    found = fetch(app_with(engine), "GET", "/version").json()
    assert found["invariant_rows"] == "off"
    assert found.get("kernels", "") == kernels and ("rows_in_one_thread" in found) == bool(kernels)
    assert found["memory"] == {"file": None, "weights": 1, "caches": 1, "rest": None}


def test_errors_of_any_layer_keep_their_headers_and_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Unexpected errors, errors of the middleware, and preflights."""
    caplog.set_level("INFO", "outrider.requests")
    page = "https://page.example"
    headers = {"Origin": page, "X-Request-Id": "mine"}
    app = app_with(BrokenEngine(), limits__body_bytes=1024, server__cors_origins=[page])
    preflight = {"Access-Control-Request-Method": "POST"}
    assert fetch(app, "OPTIONS", "/v1/completions", headers=headers | preflight).status_code == 200
    for body, extra, status in (({"prompt": "x"}, {}, 500), ({"prompt": "x" * 2000}, {}, 413), ({}, {"Host": "evil"}, 421)):
        response = fetch(app, "POST", "/v1/completions", body, headers=headers | extra)
        assert response.status_code == status
        assert (response.headers["x-request-id"] == "mine") == (status != 421)  # before the host is known, no client chooses it
        assert response.headers["access-control-allow-origin"] == page
        assert response.json()["error"]["message"]
        endpoint = "/v1/completions" if status == 500 else "other"
        assert f'outrider_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in app.state.metrics.render().decode()
    logged = [record.__dict__["fields"] for record in caplog.records if record.name == "outrider.requests"]
    assert [fields["status"] for fields in logged] == [200, 500, 413, 421]
    assert [fields["request_id"] for fields in logged[1:3]] == ["mine", "mine"]


class BrokenEngine(FakeEngine):
    """Fails with an error that no handler expects."""

    async def wait_started(self) -> Ready:
        raise RuntimeError("broken")


def test_a_prefix_is_taken_off_once_whether_a_proxy_does_it_or_not() -> None:
    app = app_with(FakeEngine("a"), server__path_prefix="/llm", auth__keys={"alice": "alices-key"})
    for path in ("/llm/health", "/health", "/llm/"):  # need no key
        assert fetch(app, "GET", path).status_code == 200
    for path, status in (("/llm/v1/models", 200), ("/v1/models", 200), ("/llm/llm/v1/models", 404), ("/llmv1/models", 404)):
        assert fetch(app, "GET", path).status_code == 401
        assert fetch(app, "GET", path, headers={"Authorization": "Bearer alices-key"}).status_code == status
    redirect = fetch(app, "GET", "/llm")
    assert (redirect.status_code, redirect.headers["location"]) == (308, "/llm/")  # the page's links are relative
    described = fetch(app, "GET", "/llm/openapi.json", headers={"Authorization": "Bearer alices-key"}).json()
    assert described["servers"] == [{"url": "/llm"}]


def test_an_address_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"Cannot listen on 127.0.0.1:{port} .*choose another --port"):
            listen("127.0.0.1", port)
        with pytest.raises(OSError, match=r"choose another --metrics\.port"):
            listen("127.0.0.1", port, "--metrics.port")
    with listen("::1", 0) if socket.has_ipv6 else listen("127.0.0.1", 0) as other:
        assert other.getsockname()[1] > 0


def test_a_public_address_needs_keys_or_auth_open() -> None:
    for flags in ({}, {"server.host": "0.0.0.0", "auth.open": True}, {"server.host": "::", "auth.keys": {"a": "long-enough"}}):
        check_address(load_settings(None, cast(dict[str, Any], flags)))
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0 is a public address"):
        check_address(load_settings(None, {"server.host": "0.0.0.0"}))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Starts a server in this process, which must fail before a worker starts. Returns its sentence."""
    monkeypatch.setattr(serve, "configure", lambda _: None)
    monkeypatch.setattr(serve, "WorkerProcess", lambda: pytest.fail("a worker was started"))

    def start(**flags: Any) -> str:
        settings = {name if "." in name else f"server.{name}": value for name, value in flags.items()}
        assert serve.run(load_settings(None, settings)) == 2
        return capsys.readouterr().err

    return start


def test_no_worker_starts_for_an_encoder(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    message = refused(port=0, **{"model.path": str(tmp_path)})
    assert message == f"outrider: {tmp_path} is an encoder and writes no text; serve it with --models.paths instead.\n"


def test_no_worker_starts_at_a_public_address_without_keys(refused: Callable[..., str]) -> None:
    message = refused(host="0.0.0.0", port=0)
    assert message.startswith("outrider: ") and message.count("\n") == 1
    assert "there are no API keys; set auth.keys" in message


@pytest.mark.parametrize("path", mostly_slow(["bad.gguf", "no/such/folder", "empty"], "bad.gguf"))
@pytest.mark.parametrize("setting", ["model.path", "draft_model.path"])
def test_a_bad_model_is_refused_before_anything_heavy_is_imported(tmp_path: Path, path: str, setting: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "empty").mkdir()
    program = (
        "import sys; from outrider.server.serve import run; from outrider.server.settings import load_settings;"
        f"code = run(load_settings(None, {{'server.port': 0, {setting!r}: {path!r}}}));"
        "print(code, *{'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "2\n"
    assert done.stderr.startswith("outrider: ") and done.stderr.count("\n") == 1 and "tokenizer of" not in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", None, "The tokenizer of"),
        ("config.json", {"num_hidden_layers": 10**6}, "says that it has 1000000 layers"),
    ],
)
def test_a_damaged_model_is_one_sentence_whichever_process_reads_it(
    tmp_path: Path, file: str, content: Any, reason: str
) -> None:
    folder = shutil.copytree(models.TARGET, tmp_path / "model")
    damaged = content and json.loads((folder / file).read_text()) | content
    (folder / file).write_text(json.dumps(damaged))
    command = [sys.executable, "-m", "outrider.server.cli", "serve", "--server.port", "0", "--model.path", str(folder)]
    done: Any = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.startswith("outrider: ") and "serving" not in line]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(lines) == 1 and reason in lines[0] and lines[0].endswith("name another one.")


ABSENT = ("scipy", "sklearn", "pandas", "transformers", "outrider.server.worker")
PROGRAM = f"""
import sys
import outrider.server.cli, outrider.server.serve
from outrider.server.imports import hide_torch
hide_torch()
from outrider import models
from outrider.verify.tokenizer import load_tokenizer
tokenizer = load_tokenizer(str(models.TARGET))
assert tokenizer.apply_chat_template([{{"role": "user", "content": "x"}}], tokenize=False)
assert sys.modules["torch"] is None
print([name for name in sys.modules if name.startswith({ABSENT!r}) or name.startswith("torch.")])
"""


def test_the_front_end_works_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
