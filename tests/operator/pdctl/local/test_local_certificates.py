"""The per-run certificates, checked by OpenSSL."""

import ssl
import stat
from pathlib import Path

import pytest

from pdcluster_schema.ports import WORKER_NAME
from pdctl.local.run_directory import Certificates, make_certificates
from tests.operator.pdcluster_api.certificates.handshakes import handshake


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


def context(side: Certificates, protocol: int, trusted: Certificates) -> ssl.SSLContext:
    """Mutual TLS: present `side`, trust only `trusted`'s authority, by OpenSSL's strict rules."""
    made = ssl.SSLContext(protocol)
    made.load_cert_chain(side.certificate, side.key)
    made.load_verify_locations(trusted.ca)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


@pytest.mark.parametrize("name", [WORKER_NAME, "127.0.0.1"])
def test_certificates_serve_both_ends_of_mutual_tls(name: str, certificates: Certificates) -> None:
    handshake(
        context(certificates, ssl.PROTOCOL_TLS_SERVER, certificates),
        context(certificates, ssl.PROTOCOL_TLS_CLIENT, certificates),
        name,
    )


def test_certificates_of_another_run_are_refused(
    certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = make_certificates(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(
            context(other, ssl.PROTOCOL_TLS_SERVER, other),
            context(certificates, ssl.PROTOCOL_TLS_CLIENT, certificates),
            WORKER_NAME,
        )


def test_certificate_files_are_for_this_user_only(certificates: Certificates) -> None:
    assert {
        stat.S_IMODE(path.stat().st_mode)
        for path in (certificates.ca, certificates.certificate, certificates.key)
    } == {0o600}
