"""Credentials of a control plane: its CA, certificates by name, a service-account key, and
kubeconfigs.
"""

import base64
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# of the Service `kubernetes`, the first of the range that the API server is given
SERVICE_ADDRESS = "10.96.0.1"
_SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


class Credentials:
    """PEM files in one folder, signed by one CA of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca_key = ec.generate_private_key(ec.SECP256R1())
        self._ca_name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, "control plane of the tests")]
        )
        self.ca = folder / "ca.pem"
        certificate = _builder(self._ca_name, self._ca_name, self._ca_key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), True
        )
        self.ca.write_bytes(
            certificate.sign(self._ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def serving(self) -> tuple[Path, Path]:
        """Certificate and key of the API server."""
        addresses = [
            x509.IPAddress(ipaddress.ip_address(each)) for each in ("127.0.0.1", SERVICE_ADDRESS)
        ]
        names = x509.SubjectAlternativeName(
            [*(x509.DNSName(each) for each in _SERVER_NAMES), *addresses]
        )
        return self._issue("apiserver", [], ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, user: str, *groups: str) -> tuple[Path, Path]:
        """Certificate and key of a user of the API server."""
        return self._issue(user, list(groups), ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def service_account_key(self) -> Path:
        """The key that signs the tokens of service accounts."""
        return _write_key(
            self._folder / "service-account.key", ec.generate_private_key(ec.SECP256R1())
        )

    def kubeconfig(self, url: str, user: str, *groups: str) -> Path:
        """A kubeconfig of one user, whole in one file."""
        certificate, key = self.client(user, *groups)
        account = {
            "client-certificate-data": _encoded(certificate),
            "client-key-data": _encoded(key),
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": url, "certificate-authority-data": _encoded(self.ca)},
                }
            ],
            "users": [{"name": user, "user": account}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path = self._folder / f"{user.replace(':', '-')}.kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path

    def _issue(
        self,
        name: str,
        groups: list[str],
        usage: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None,
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self._ca_name, key).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        stem = name.replace(":", "-")
        certificate = self._folder / f"{stem}.pem"
        certificate.write_bytes(
            builder.sign(self._ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        return certificate, _write_key(self._folder / f"{stem}.key", key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number()
    )
    return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(
        now + timedelta(days=2)
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.touch(mode=0o600)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    return path


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
