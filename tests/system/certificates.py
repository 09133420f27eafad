"""A small CA and one worker certificate of it, as the cluster's operator would make them."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdcluster_schema.ports import WORKER_NAME


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
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdcluster test CA")])
    ca = (
        _builder(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    worker_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, WORKER_NAME)])
    names = x509.SubjectAlternativeName([x509.DNSName(WORKER_NAME)])
    certificate = (
        _builder(worker_name, ca_name, key)
        .add_extension(names, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    files = Certificates(folder / "ca.pem", folder / "worker.pem", folder / "worker.key")
    files.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
    )
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )
