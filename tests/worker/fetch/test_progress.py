"""The log lines of a download."""

import logging
import threading
from pathlib import Path

import pytest

from pdcluster_worker.fetch import download
from pdcluster_worker.fetch.download import logged_progress
from pdcluster_worker.fetch.hf_hub import RemoteFile


class Lines(logging.Handler):
    """Keeps the last line and says when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()
        self.came.set()


def test_share_and_rate_are_logged_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LOG_SECONDS", 0.01)
    monkeypatch.setattr(download.logger, "level", logging.INFO)
    lines = Lines()
    download.logger.addHandler(lines)
    try:
        (tmp_path / "w.part").write_bytes(bytes(50))
        (tmp_path / "other").write_bytes(bytes(9))
        with logged_progress(tmp_path, [RemoteFile("w"), RemoteFile("absent")], 200):
            assert lines.came.wait(20)
    finally:
        download.logger.removeHandler(lines)
    assert lines.line.startswith(f"fetching {tmp_path.name} percent=25.0 bytes=50 of=200 ")
    assert "bytes_per_second=" in lines.line
