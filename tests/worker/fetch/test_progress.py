"""The log lines of a download."""

import logging
import threading

import pytest

from pdcluster_worker.fetch import download
from pdcluster_worker.fetch.download import DownloadProgress


class Lines(logging.Handler):
    """Keeps the last line and says when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()
        self.came.set()


def test_share_and_rate_are_logged_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LOG_SECONDS", 0.01)
    monkeypatch.setattr(download.logger, "level", logging.INFO)
    lines = Lines()
    download.logger.addHandler(lines)
    try:
        with DownloadProgress("tiny", 200) as counted:
            counted.add(60)
            counted.add(-10)
            assert lines.came.wait(20)
    finally:
        download.logger.removeHandler(lines)
    assert lines.line.startswith("fetching tiny percent=")
    assert "of=200 bytes_per_second=" in lines.line
    assert counted.done == 50
