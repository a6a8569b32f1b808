"""Whatever the hub's client raises is one sentence."""

from __future__ import annotations

import httpx
import huggingface_hub
import pytest
import requests
from huggingface_hub import errors

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
