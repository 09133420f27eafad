"""Mutual TLS in memory, by OpenSSL's strict rules, between two workers that each have the files of
a Secret.
"""

import contextlib
import ssl
from pathlib import Path

from pdcluster_api.certificates.authority import StoredSecret
from pdcluster_schema.ports import WORKER_NAME


def context(files: StoredSecret, protocol: int, folder: Path) -> ssl.SSLContext:
    """One end: shows tls.crt, accepts only what ca.crt's authorities signed."""
    made = ssl.SSLContext(protocol)
    certificate, key = folder / "tls.crt", folder / "tls.key"
    certificate.write_bytes(files.data["tls.crt"])
    key.write_bytes(files.data["tls.key"])
    made.load_cert_chain(certificate, key)
    made.load_verify_locations(cadata=files.data["ca.crt"].decode())
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = WORKER_NAME) -> None:
    """One handshake, in which each side checks the other.  Raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in ends * 3:  # as many turns as TLS 1.3 takes, and one to spare
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert [end.version() for end in ends] == ["TLSv1.3", "TLSv1.3"]


def talk(one: StoredSecret, other: StoredSecret, folder: Path) -> None:
    """Both ways round.  Raises ssl.SSLError."""
    for server, client in ((one, other), (other, one)):
        handshake(
            context(server, ssl.PROTOCOL_TLS_SERVER, folder),
            context(client, ssl.PROTOCOL_TLS_CLIENT, folder),
        )
