"""Paths of models: folders, hub ids and GGUF files; the hub's errors are one sentence, and its progress one line."""

import io
import itertools
from pathlib import Path

import httpx
import huggingface_hub
import pytest
import requests
from huggingface_hub import errors

from outrider.verify import checkpoint
from outrider.verify.checkpoint import Location, check_format, locate
from outrider.verify.download import DownloadLine, download_progress
from outrider.verify.errors import ModelError
from outrider.verify.hub import check_reachable, model_file

RAISED: list[Exception] = [
    httpx.ConnectError("[Errno -3] Temporary failure in name resolution"),
    httpx.ReadTimeout("timed out"),
    requests.ConnectionError("refused"),
    errors.LocalEntryNotFoundError("cannot find the requested files in the local cache"),
    errors.OfflineModeIsEnabled("offline"),
    errors.HFValidationError("Repo id must use alphanumeric chars"),
    errors.XetDownloadError("xet"),
    PermissionError("denied"),
    *[each("the client's") for each in errors.HfHubHTTPError.__mro__ if each.__name__ == "HTTPError"],
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_the_client_raises_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", raising)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(ModelError, match=r"^someone/x/a\.gguf cannot be downloaded: \S"):
        model_file("someone/x", "a.gguf", "main")
    for name in (None, "a.gguf"):
        with pytest.raises(ModelError, match=r"^someone/x cannot be downloaded: "):
            check_reachable("someone/x", name, "main")


GB = 10**9


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    seconds = 0.0
    line = DownloadLine("org/model", io.StringIO(), lambda: seconds)
    for step in range(1001):
        seconds = step * 0.021
        line.record(step * GB // 1000, GB)
    assert [message.rpartition("(")[2] for message in caplog.messages] == ["4 %)", "52 %)", "100 %)"]


def test_the_bars_of_a_download_share_a_line() -> None:
    kind = download_progress("org/model")
    screen, clock = Screen(), itertools.count(step=2.0)
    kind.line = DownloadLine("org/model", screen, clock.__next__)
    with (
        kind(desc="network", unit="B", total=0) as network,
        kind(desc="disk", unit="B", total=0) as disk,
        kind(total=3) as files,
    ):
        network.total = disk.total = GB
        network.update(GB // 2)
        disk.update(GB // 4)
        files.update(1)
        network.update(GB // 2)
    shares = [part.partition("%")[0].rpartition("(")[2] for part in screen.getvalue().split("\r")[1:]]
    assert shares == ["50 ", "50 ", "100 "]
    assert "network" not in screen.getvalue()


def test_a_file_is_a_folder_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    location = locate(f"{tmp_path}/model.gguf")
    assert location == Location(str(tmp_path), "model.gguf")
    assert location.arguments == {"gguf_file": "model.gguf"}
    monkeypatch.chdir(tmp_path)
    assert locate("model.gguf") == Location(".", "model.gguf")
    assert locate("owner/model-GGUF/model-Q4_0.gguf") == Location("owner/model-GGUF", "model-Q4_0.gguf")
    assert locate("owner/model") == Location("owner/model") and Location("owner/model").arguments == {}


@pytest.mark.parametrize("path", ["missing.gguf", "/no/such/file.gguf", "./a/b.gguf"])
def test_a_missing_file_is_reported(path: str) -> None:
    with pytest.raises(ModelError, match="There is no file"):
        locate(path)


def test_a_folder_of_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match=r"give one of its files, such as .*/a\.gguf"):
        locate(str(tmp_path))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs gptqmodel and accelerate; install with pip install gptqmodel acc"):
        check_format("m", {"quant_method": "awq"})
    check_format("m", {})
