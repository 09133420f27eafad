"""The certificates of one run, as files; the authority's key is never written to disk."""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from pdcluster_api.certificates.authority import WORKER_NAME, issue, make_authority


@dataclass(frozen=True)
class Certificates:
    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority(now)
    worker = issue(authority, [WORKER_NAME, "127.0.0.1"], now)
    files = Certificates(folder / "ca.pem", folder / "worker.pem", folder / "worker.key")
    _write(files.ca, authority.certificate)
    _write(files.certificate, worker.certificate)
    _write(files.key, worker.key)
    return files


def _write(path: Path, content: bytes) -> None:
    """Created with mode 0600: no reader in between."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
