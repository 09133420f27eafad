"""A real etcd that speaks TLS, with or without asking its clients for a certificate."""

import datetime
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdcluster_api.certificates.authority import Pair, issue
from tests.authorities import NOW, new_authority, write_pair
from tests.etcd_member import etcd_flags
from tests.ports import free_port

DEADLINE_SECONDS = 20.0


@dataclass(frozen=True)
class TlsEtcd:
    """endpoint: host:port; authority: issuer of its certificate; client: a certificate that it
    accepts.
    """

    endpoint: str
    authority: Pair
    client: Pair


def client_of(authority: Pair, user: str) -> Pair:
    """A client certificate for a user of etcd's own access control, which is its common name."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = x509.load_pem_x509_certificate(authority.certificate)
    signer_key = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer_key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        signer.subject, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, user)]), key.public_key()
    )
    certificate = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(hours=1))
        .not_valid_after(NOW + datetime.timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(signer_key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return Pair(
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
    )


@contextmanager
def tls_etcd(folder: Path, *, asks_clients: bool, host: str = "127.0.0.1") -> Iterator[TlsEtcd]:
    """Runs within the block; its certificate is for `host` alone."""
    authority = new_authority()
    certificate, key = write_pair(folder, "server", issue(authority, [host], NOW))
    ca, _ = write_pair(folder, "ca", authority)
    endpoint = f"127.0.0.1:{free_port()}"
    command = [
        str(Path(sys.executable).with_name("etcd")),
        *etcd_flags(folder / "data", f"https://{endpoint}", free_port()),
        *("--cert-file", str(certificate), "--key-file", str(key)),
        *(("--client-cert-auth", "--trusted-ca-file", str(ca)) if asks_clients else ()),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, endpoint)
        yield TlsEtcd(endpoint, authority, issue(authority, ["client"], NOW))
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"etcd ended with {process.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("etcd did not start")
