"""A small CA and one worker certificate of it, as the cluster's operator would make them."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.authorities import new_authority, worker_pair, write_pair


@dataclass(frozen=True)
class Certificates:
    """PEM files: the CA, and a certificate with its key that the CA signed."""

    ca: Path
    certificate: Path
    key: Path

    def settings(self) -> dict[str, str]:
        return {"ca": str(self.ca), "certificate": str(self.certificate), "key": str(self.key)}

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )


def make_certificates(folder: Path) -> Certificates:
    """Make a new CA; certificates of two calls do not trust each other."""
    folder.mkdir(parents=True)
    authority = new_authority()
    ca, _ = write_pair(folder, "ca", authority)
    return Certificates(ca, *write_pair(folder, "worker", worker_pair(authority)))
