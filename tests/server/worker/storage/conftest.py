"""Pages of two sizes, for the tests of saved sessions."""

from collections.abc import Iterator

import pytest

from outrider.verify.model.cache import kv_cache


@pytest.fixture(autouse=True)
def private_paths(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No log line names a file of a principal's folder."""
    yield
    assert not [line for line in caplog.messages if ".session" in line or ".page" in line]


@pytest.fixture(scope="module", params=[16, 256])
def page_tokens(request: pytest.FixtureRequest) -> Iterator[int]:
    """Pages that a text has several of, or not one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_TOKENS", request.param)
        yield request.param
