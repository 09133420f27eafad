"""The cluster's certificate authority and the one certificate of its workers (EC P-256, PEM), and
the two Secrets that hold them. Peers are checked by name, not by address. Users edit Secrets: a
part that cannot be used is a fault as text.
"""

import base64
import datetime
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdcluster_schema.ports import WORKER_NAME

AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
LEAF_LIFETIME = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes


def make_authority(now: datetime.datetime) -> Pair:
    """Its name is its own, so that two can be distinguished where both are accepted."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _name(f"PDCluster CA {serial:x}"[:64])  # an X.509 common name ends at 64 characters
    builder = (
        _builder(name, name, key.public_key(), now)
        .serial_number(serial)
        .not_valid_after(now + AUTHORITY_LIFETIME)
    )
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue(authority: Pair, names: Iterable[str], now: datetime.datetime) -> Pair:
    """A certificate for both ends of mutual TLS, good for these DNS names and IP addresses; it ends
    with its authority at the latest.  Raises ValueError where the authority is none.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate)
    signer_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(signer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not an elliptic curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + LEAF_LIFETIME, signer.not_valid_after_utc)
    builder = _builder(_name(WORKER_NAME), signer.subject, key.public_key(), now)
    certificate = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()),
            critical=False,
        )
        .sign(signer_key, hashes.SHA256())
    )
    return _pair(certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .not_valid_before(now - _CLOCK_SKEW)
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


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pem = serialization.Encoding.PEM
    return Pair(
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


CA_CERTIFICATES, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


@dataclass(frozen=True)
class StoredSecret:
    """Decoded content of one Secret; annotations: those of the object."""

    data: Mapping[str, bytes]
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, secret: Mapping[str, Any] | None) -> "StoredSecret | None":
        """A value that is not base64 reads as empty; None for None."""
        if secret is None:
            return None
        data = {key: _decoded(value) for key, value in (secret.get("data") or {}).items()}
        return cls(data, secret.get("metadata", {}).get("annotations") or {})

    @property
    def certificate_end(self) -> datetime.datetime | None:
        """Time when its certificate ends, or has ended; None = it cannot be read."""
        try:
            found = x509.load_pem_x509_certificate(self.data.get(CERTIFICATE, b""))
        except _UNREADABLE:
            return None
        return found.not_valid_after_utc


@dataclass(frozen=True)
class HeldPairs:
    authority: x509.Certificate | None  # None = `authority_fault` says why there is none
    authority_fault: str
    # the authorities that workers accept, in the order of the file
    accepted: tuple[x509.Certificate, ...]
    # the workers' certificate; None = `leaf_fault` says why there is none
    leaf: x509.Certificate | None
    leaf_fault: str


def read_secrets(
    ca: StoredSecret | None, tls: StoredSecret | None, now: datetime.datetime
) -> HeldPairs:
    authority, authority_fault = _read_pair(ca, now)
    if authority is not None and not _is_authority(authority):
        authority, authority_fault = (
            None,
            f"{CERTIFICATE} is not the certificate of an authority with an EC key",
        )
    accepted = _authorities(tls, now)
    leaf, leaf_fault = _read_pair(tls, now)
    signers = [*accepted, *([authority] if authority else [])]
    if leaf is not None and WORKER_NAME not in _dns_names(leaf):
        leaf, leaf_fault = None, f"{CERTIFICATE} is not for {WORKER_NAME}"
    elif leaf is not None and not any(is_issued_by(leaf, signer) for signer in signers):
        leaf, leaf_fault = None, f"{CERTIFICATE} is of no authority in {CA_CERTIFICATES}"
    return HeldPairs(authority, authority_fault, accepted, leaf, leaf_fault)


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (*_UNREADABLE, InvalidSignature):
        return False
    return True


def _read_pair(
    stored: StoredSecret | None, now: datetime.datetime
) -> tuple[x509.Certificate | None, str]:
    """(certificate, "") of a certificate in force with its key, or (None, what is wrong)."""
    if stored is None:
        return None, "it does not exist"
    try:
        certificate = x509.load_pem_x509_certificate(stored.data.get(CERTIFICATE, b""))
    except _UNREADABLE:
        return None, f"{CERTIFICATE} is not a PEM certificate"
    try:
        key = serialization.load_pem_private_key(stored.data.get(KEY, b""), password=None)
    except _UNREADABLE:
        return None, f"{KEY} is not an unencrypted PEM key"
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        return None, f"{KEY} does not belong to {CERTIFICATE}"
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        span = (
            f"{certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        )
        return None, f"{CERTIFICATE} is valid only from {span}"
    return certificate, ""


def _authorities(tls: StoredSecret | None, now: datetime.datetime) -> tuple[x509.Certificate, ...]:
    """Those in force; one broken block makes the whole file unreadable, for gRPC too."""
    try:
        found = x509.load_pem_x509_certificates(tls.data.get(CA_CERTIFICATES, b"")) if tls else []
    except _UNREADABLE:
        return ()
    return tuple(
        one
        for one in found
        if _is_authority(one) and one.not_valid_before_utc <= now < one.not_valid_after_utc
    )


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        return basic.ca and isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    except (*_UNREADABLE, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.DNSName)
    except (*_UNREADABLE, x509.ExtensionNotFound, x509.DuplicateExtension):
        return []


def _public_bytes(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def _decoded(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        return b""
