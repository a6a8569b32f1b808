"""`outrider pull`, `list`, `remove` and `pair`; settings as flags, help and completion."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from outrider import models
from outrider.models import packaged
from outrider.server import pair
from outrider.server.command import EXTRA_FLAGS, SettingsCommand
from tests.hub import LARGE_BYTES, MODEL, HubHandler, commit_of, serving_hub
from tests.stand_in import handling
from tests.tokenizers import write_qwen

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with one model of 1,000 bytes."""
    repository = tmp_path / "hub" / "models--owner--small"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs" / "weights").write_bytes(bytes(1000))
    (repository / "snapshots" / COMMIT / "model.safetensors").symlink_to(repository / "blobs" / "weights")
    return tmp_path


def outrider(cache: Path, *arguments: str, hub: str = "", columns: int = 200) -> subprocess.CompletedProcess[str]:
    network = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"} if hub else {"HF_HUB_OFFLINE": "1"}
    environment = os.environ | {"HOME": str(cache), "HF_HOME": str(cache), "COLUMNS": str(columns)} | network
    command = [sys.executable, "-m", "outrider.server.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_models_are_listed_and_removed(cache: Path) -> None:
    (cache / "a.gguf").write_bytes(bytes(2000))
    listed = outrider(cache, "list", "--models.paths", f'["{cache / "a.gguf"}"]')
    assert listed.returncode == 0, listed.stderr
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert lines[1][:3] == ["a", "2.0", "kB"] and lines[2][:3] == ["owner/small", "1.0", "kB"]
    assert outrider(cache, "remove", "owner/small").stdout == "Removed owner/small: 1.0 kB.\n"
    assert not (cache / "hub" / "models--owner--small" / "blobs").exists()
    assert "owner/small" not in outrider(cache, "list").stdout


@pytest.mark.parametrize("name", packaged.NAMES[-1:])
def test_models_of_the_package_index_are_listed_and_removed(cache: Path, name: str) -> None:
    file = cache / ".cache" / "outrider" / "models" / f"{name}.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3000))
    if packaged.place(name).parent == packaged.FOLDER:  # its package is not installed
        rows = [" ".join(line.split()) for line in outrider(cache, "list").stdout.splitlines()]
        assert f"{name} 3.0 kB {file}" in rows
        assert f"{name} " in outrider(cache, "list", columns=80).stdout  # whole, to be pasted
    assert outrider(cache, "remove", name).stdout == f"Removed {name}: 3.0 kB.\n"
    assert not file.exists()
    again = outrider(cache, "remove", name)
    assert again.returncode == 2 and f"outrider pull has not downloaded {name}" in again.stderr


def test_one_file_of_a_repository_is_pulled_and_its_hash_checked(cache: Path) -> None:
    folder = cache / "main"
    folder.mkdir()
    for types in ("Q4_K_M", "Q8_0"):
        (folder / f"m-{types}.gguf").write_bytes(types.encode())
    with serving_hub({"main": folder}) as (url, _):
        done = outrider(cache, "pull", f"hf.co/{MODEL}:q8_0", hub=url)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"serve it with: outrider serve --model {MODEL}/m-Q8_0.gguf\n")
        pulled = list((cache / "hub").glob("models--someone--model/snapshots/*/*"))
        assert [file.name for file in pulled] == ["m-Q8_0.gguf"]
        pulled[0].resolve().write_bytes(b"other")
        done = outrider(cache, "pull", f"{MODEL}:q8_0", hub=url)
        assert done.returncode == 2
        assert f"The hash of m-Q8_0.gguf is not the hub's; remove it with outrider remove {MODEL}" in done.stderr
        done = outrider(cache, "pull", MODEL, hub=url)
        assert f"{MODEL} has " in done.stdout and "this is Q4_K_M, which fits" in done.stdout


def test_a_pull_that_broke_off_goes_on_where_it_was(cache: Path) -> None:
    folder = cache / "main"
    folder.mkdir()
    content = os.urandom(40 * LARGE_BYTES)
    (folder / "m-Q8_0.gguf").write_bytes(content)
    starts: list[int] = []

    class Breaking(HubHandler):
        def finish_with(self, data: bytes) -> None:
            if self.command == "GET" and len(data) > LARGE_BYTES:
                starts.append(len(content) - len(data))
                if len(starts) == 1:
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
            super().finish_with(data)

    Breaking.revisions, Breaking.asked, Breaking.pause_seconds = {"main": folder, commit_of("main"): folder}, [], 0.0
    with handling(Breaking) as url:
        done = outrider(cache, "pull", f"{MODEL}:Q8_0", hub=url)
    assert done.returncode == 0, done.stderr
    assert starts[0] == 0 and starts[1] > 0
    (pulled,) = (cache / "hub").glob("models--someone--model/snapshots/*/*")
    assert pulled.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("remove", "owner/other"), "The hub's cache has no model owner/other; outrider list shows"),
        (("pull", "small"), "small is no Hugging Face id; give owner/name"),
        (("pull", "modelscope.cn/owner/name"), "modelscope download --model owner/name"),
        (("pull", "owner/name/a.gguf"), "owner/name/a.gguf cannot be downloaded: "),
        (("list", "--models.paths", '["nowhere"]'), "nowhere in models.paths is no file"),
    ],
)
def test_errors_are_one_sentence(cache: Path, arguments: tuple[str, ...], words: str) -> None:
    found = outrider(cache, *arguments)
    assert found.returncode == 2
    assert words in found.stderr and len(found.stderr.splitlines()) == 1


app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=EXTRA_FLAGS)
def show(context: typer.Context, port: int = 0) -> None:
    """Show the flags."""
    print(port, context.args)


COMMAND: Any = typer.main.get_command(app)


def completions(arguments: list[str], incomplete: str) -> list[str]:
    context = COMMAND.make_context("show", arguments, resilient_parsing=True)
    return [item.value for item in COMMAND.shell_complete(context, incomplete)]


def test_settings_are_passed_as_arguments() -> None:
    result = CliRunner().invoke(app, ["--port", "3", "--server.port", "4"])
    assert result.output == "3 ['--server.port', '4']\n"


def test_the_shell_completes_settings() -> None:
    assert completions([], "--po") == ["--port"]
    assert completions([], "--server.po") == ["--server.port"]
    assert "--speculation.trigram.table" in completions([], "--speculation.t")


def test_the_shell_completes_choices() -> None:
    context = COMMAND.make_context("show", [], resilient_parsing=True)
    dtype = next(parameter for parameter in COMMAND.get_params(context) if "--model.dtype" in parameter.opts)
    assert [item.value for item in dtype.shell_complete(context, "b")] == ["bfloat16"]


def test_help_lists_options_and_settings() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for flag in ("--port ", "--server.port ", "--speculation.retrieval.datastores ", "--tracing.endpoint "):
        assert flag in result.output


def run(*flags: str) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    pair.register(app)
    result = CliRunner().invoke(app, ["pair", *flags, "--speculation.cost_folder", "null"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_model_that_can_draft_has_a_gain_and_one_that_cannot_a_reason(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    found = run(str(models.TARGET), "--draft", str(models.DRAFT), "--draft", str(tmp_path), "--tokens", "16")
    assert "cannot draft for this target: token 0 is" in found
    [row] = [part for part in found.split(str(models.DRAFT)) if "%" in part]
    share, _, tokens, _, gain = row.split()[:5]
    assert 30 < int(share.rstrip("%")) <= 100  # trained as its draft model
    assert 1 <= int(tokens) <= pair.MOST_TOKENS
    assert float(gain) > 0
    assert ("--draft-model" in found) == (float(gain) >= pair.LEAST_GAIN)


def test_smaller_models_in_the_folder_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, model in {"target": models.TARGET, "draft": models.DRAFT}.items():
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / name).symlink_to(model)
    found = run(str(tmp_path / "models" / "target"), "--tokens", "8")
    assert f"{tmp_path / 'models' / 'draft'} " in found
    assert f"{tmp_path / 'models' / 'target'} " not in found.replace(f"--model {tmp_path / 'models' / 'target'}", "")


@pytest.mark.parametrize(
    ("equal", "length", "expected"),
    [("11111", 4, 1), ("11111", 2, 2), ("00000", 3, 5), ("1101101", 3, 3), ("1", 4, 1), ("0", 4, 1)],
)
def test_steps(equal: str, length: int, expected: int) -> None:
    assert pair.steps(np.array([each == "1" for each in equal]), length) == expected


def test_the_best_length_is_that_of_the_least_time() -> None:
    costs = np.linspace(1, 1.8, 9)  # each further row costs a tenth of a step
    right, wrong = np.ones(60, np.bool_), np.zeros(60, np.bool_)
    assert pair.best_length([right], costs, 0.05).tokens == 8
    assert pair.best_length([right], costs, 0.05).speed == pytest.approx(60 / (7 * 2.2))
    assert pair.best_length([wrong], costs, 0.05).speed == pytest.approx(1 / 1.15)
    assert pair.best_length([right], costs, 2.0).speed < 1
