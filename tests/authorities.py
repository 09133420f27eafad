"""Certificate authorities and certificates, as the operator makes them for a cluster."""

import datetime
from pathlib import Path

from pdcluster_api.certificates.authority import Pair, issue, make_authority
from pdcluster_schema.ports import WORKER_NAME

NOW = datetime.datetime.now(datetime.UTC)


def new_authority() -> Pair:
    """An authority that no other trusts."""
    return make_authority(NOW)


def worker_pair(authority: Pair) -> Pair:
    """The certificate that every worker of a cluster shows."""
    return issue(authority, [WORKER_NAME], NOW)


def write_pair(folder: Path, name: str, pair: Pair) -> tuple[Path, Path]:
    """The two files of a certificate."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    return certificate, key
