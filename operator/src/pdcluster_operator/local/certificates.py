"""The cluster's small certificate authority and the one certificate that its workers share.

EC P-256.  The authority's key is never written down: it signs one certificate
and is forgotten with the run.  Peers are checked by name, not by address.
"""

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

WORKER_NAME = "worker.pdcluster"  # what a worker expects its peer's certificate to say
_LIFE = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Certificates:
    """PEM files of one cluster: the authority's certificate, the workers' certificate and its key."""

    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and a worker certificate in `folder`, readable by this user only."""
    ca_key, worker_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key)
    worker = _worker_certificate(worker_key, ca, ca_key)
    files = Certificates(folder / "ca.pem", folder / "worker.pem", folder / "worker.key")
    _write(files.ca, ca.public_bytes(serialization.Encoding.PEM))
    _write(files.certificate, worker.public_bytes(serialization.Encoding.PEM))
    _write(
        files.key,
        worker_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return files


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("PDCluster CA")
    return (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _worker_certificate(key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    names = x509.SubjectAlternativeName([x509.DNSName(WORKER_NAME), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    return (
        _builder(_name(WORKER_NAME), ca.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _write(path: Path, content: bytes) -> None:
    """Create a file that only this user can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
