"""The progress of a download is one line on a terminal, and a few lines in a log."""

from __future__ import annotations

import io
import itertools

import pytest

from outrider.verify.download import DownloadLine, download_progress

GB = 10**9


class Screen(io.StringIO):
    """A terminal."""

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
