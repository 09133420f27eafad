"""Certificates of an authority: names, lives, and OpenSSL's view of them."""

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from pdcluster_api.certificates.authority import (
    AUTHORITY_LIFETIME,
    LEAF_LIFETIME,
    Pair,
    StoredSecret,
    issue,
    make_authority,
)
from pdcluster_schema.ports import WORKER_NAME
from tests.operator.pdcluster_api.certificates.handshakes import context, handshake, talk

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def files(authority: Pair, leaf: Pair) -> StoredSecret:
    return StoredSecret(
        {"ca.crt": authority.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}
    )


def test_an_authority_and_its_leaf_serve_mutual_tls(tmp_path: Path) -> None:
    authority = make_authority(NOW)
    worker = files(authority, issue(authority, [WORKER_NAME], NOW))
    talk(worker, worker, tmp_path)


@pytest.mark.parametrize("name", ["chat.example", "::1"])
def test_a_leaf_is_valid_for_the_requested_names(name: str, tmp_path: Path) -> None:
    authority = make_authority(NOW)
    worker = files(authority, issue(authority, ["chat.example", "::1"], NOW))
    ends = (
        context(worker, ssl.PROTOCOL_TLS_SERVER, tmp_path),
        context(worker, ssl.PROTOCOL_TLS_CLIENT, tmp_path),
    )
    handshake(*ends, name=name)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(*ends, name=WORKER_NAME)


def test_lives_begin_before_now_and_last_ten_years_and_one() -> None:
    authority = make_authority(NOW)
    ca = x509.load_pem_x509_certificate(authority.certificate)
    leaf = x509.load_pem_x509_certificate(issue(authority, [WORKER_NAME], NOW).certificate)
    assert (ca.not_valid_after_utc, leaf.not_valid_after_utc) == (
        NOW + AUTHORITY_LIFETIME,
        NOW + LEAF_LIFETIME,
    )
    assert ca.not_valid_before_utc < NOW > leaf.not_valid_before_utc


def test_a_leaf_never_outlives_its_authority() -> None:
    authority = make_authority(NOW)
    late = NOW + AUTHORITY_LIFETIME - datetime.timedelta(days=1)
    leaf = x509.load_pem_x509_certificate(issue(authority, [WORKER_NAME], late).certificate)
    assert leaf.not_valid_after_utc == NOW + AUTHORITY_LIFETIME


def test_two_authorities_have_two_names() -> None:
    subjects = {
        x509.load_pem_x509_certificate(make_authority(NOW).certificate).subject for _ in range(2)
    }
    assert len(subjects) == 2


def test_an_authority_of_another_kind_is_refused() -> None:
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ValueError, match="not an elliptic curve key"):
        issue(Pair(make_authority(NOW).certificate, pem), [WORKER_NAME], NOW)
