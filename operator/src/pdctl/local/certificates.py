"""The certificates of one run of `pdctl up`, as files.

The authority's key is never written down: it signs one certificate and is
forgotten with the run.  How they are made is the business of `certificates`.
"""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from pdcluster_api.certificates.authority import WORKER_NAME, issue, make_authority


@dataclass(frozen=True)
class Certificates:
    """PEM files of one cluster: the authority's certificate, the workers' certificate
    and its key.
    """

    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and a worker certificate in `folder`, readable by this user only."""
    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority(now)
    worker = issue(authority, [WORKER_NAME, "127.0.0.1"], now)
    files = Certificates(folder / "ca.pem", folder / "worker.pem", folder / "worker.key")
    _write(files.ca, authority.certificate)
    _write(files.certificate, worker.certificate)
    _write(files.key, worker.key)
    return files


def _write(path: Path, content: bytes) -> None:
    """Create a file that only this user can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
