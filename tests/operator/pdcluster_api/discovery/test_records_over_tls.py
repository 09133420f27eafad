"""The operator reads an etcd that speaks TLS, and says what is wrong when it cannot."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_api.certificates.authority import make_authority
from pdcluster_api.discovery.etcd import EtcdTLS, check_reachable, read_workers
from pdcluster_api.errors import EtcdUnreachableError
from tests.authorities import NOW
from tests.tls_etcd import TlsEtcd, tls_etcd

STRANGER = make_authority(NOW)
OWN = "/pdcluster/default/chat/workers/"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsEtcd]:
    """It asks its clients for a certificate."""
    with tls_etcd(tmp_path_factory.mktemp("etcd"), asks_clients=True) as running:
        yield running


def secret(etcd: TlsEtcd) -> dict[str, bytes]:
    return {
        "ca.crt": etcd.authority.certificate,
        "tls.crt": etcd.client.certificate,
        "tls.key": etcd.client.key,
    }


async def test_a_client_certificate_opens_it(etcd: TlsEtcd) -> None:
    tls = EtcdTLS.of_secret("etcd", secret(etcd))
    await check_reachable([etcd.endpoint], OWN, tls)
    assert await read_workers([etcd.endpoint], "/pdcluster/default/chat/workers/r1/", tls) == {}


@pytest.mark.parametrize("left", [("ca.crt",), ()])
async def test_without_a_client_certificate_or_tls_it_is_unreachable(
    left: tuple[str, ...], etcd: TlsEtcd
) -> None:
    tls = EtcdTLS.of_secret("etcd", {key: secret(etcd)[key] for key in left}) if left else None
    with pytest.raises(EtcdUnreachableError, match=f"^etcd does not answer at {etcd.endpoint}$"):
        await check_reachable([etcd.endpoint], OWN, tls)


async def test_another_authority_is_the_reason_and_not_in_the_message(etcd: TlsEtcd) -> None:
    tls = EtcdTLS.of_secret("etcd", {**secret(etcd), "ca.crt": STRANGER.certificate})
    with pytest.raises(EtcdUnreachableError) as said:
        await check_reachable([etcd.endpoint], OWN, tls)
    assert "CERTIFICATE_VERIFY_FAILED" in said.value.reason
    assert str(said.value) == f"etcd does not answer at {etcd.endpoint}"


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    with (
        tls_etcd(tmp_path, asks_clients=False, host="etcd.example") as etcd,
        pytest.raises(EtcdUnreachableError) as said,
    ):
        await check_reachable([etcd.endpoint], OWN, EtcdTLS(etcd.authority.certificate))
    assert "hostname" in said.value.reason.lower()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ca.crt": b""}, "Secret etcd: ca.crt is not a PEM certificate"),
        ({"ca.crt": b"hello"}, "ca.crt is not a PEM certificate"),
        ({"tls.crt": b""}, "tls.crt and tls.key cannot be read"),
        ({"tls.key": b"hello"}, "tls.crt and tls.key cannot be read"),
        ({"tls.key": STRANGER.key}, "tls.key does not belong to tls.crt"),
    ],
)
def test_a_secret_that_cannot_be_used_is_reported(
    change: dict[str, bytes], reason: str, etcd: TlsEtcd
) -> None:
    with pytest.raises(EtcdUnreachableError, match=reason):
        EtcdTLS.of_secret("etcd", {**secret(etcd), **change})
