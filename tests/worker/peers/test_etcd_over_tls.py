"""Discovery over TLS to a real etcd: with and without a client certificate, and with files that
change.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcluster_schema.etcd_keys import command_key, role_key, workers_prefix
from pdcluster_worker.config.worker import DiscoveryConfig, EtcdTLSConfig
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.peers.discovery import Discovery, DiscoveryEvents, DiscoveryKeys
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.peers.tls import EtcdCredentials
from tests.authorities import new_authority, write_pair
from tests.tls_etcd import TlsEtcd, tls_etcd


@pytest.fixture(scope="module", params=[False, True], ids=["server only", "mutual"])
def etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsEtcd]:
    with tls_etcd(tmp_path_factory.mktemp("etcd"), asks_clients=request.param) as running:
        yield running


@pytest.fixture
def files(etcd: TlsEtcd, tmp_path: Path) -> EtcdTLSConfig:
    """All three, as a mounted Secret has them."""
    ca, _ = write_pair(tmp_path, "ca", etcd.authority)
    certificate, key = write_pair(tmp_path, "tls", etcd.client)
    return EtcdTLSConfig(ca=str(ca), certificate=str(certificate), key=str(key))


@pytest.fixture
async def discover(record: Callable[..., WorkerRecord]) -> AsyncIterator[Callable[..., Discovery]]:
    """Start a Discovery; ended with the test."""
    started: list[Discovery] = []

    def start(etcd: TlsEtcd, tls: EtcdTLSConfig | None) -> Discovery:
        config = DiscoveryConfig(endpoints=[etcd.endpoint], tls=tls, lease_seconds=2)
        keys = DiscoveryKeys(
            workers_prefix("test", "chat", "r1"),
            command_key("test", "chat", "d"),
            role_key("test", "chat", "d"),
        )
        discovery = Discovery(
            config,
            keys,
            DiscoveryEvents(lambda _: None, lambda _: None, lambda _: None, _answers),
        )
        discovery.start(record("d"))
        started.append(discovery)
        return discovery

    yield start
    await asyncio.gather(*(one.close() for one in started))


async def _answers(_: WorkerRecord) -> bool:
    return True


async def test_a_worker_registers_over_tls(
    etcd: TlsEtcd, files: EtcdTLSConfig, discover: Any, eventually: Any
) -> None:
    discovery = discover(etcd, files)
    await eventually(lambda: discovery.registered_once)


async def test_plain_text_never_registers_and_says_so(
    etcd: TlsEtcd, discover: Any, eventually: Any
) -> None:
    discovery = discover(etcd, None)
    await eventually(lambda: etcd.endpoint in (discovery.problem or ""))
    assert not discovery.registered_once


async def test_an_etcd_of_another_authority_is_refused_until_the_file_is_put_right(
    etcd: TlsEtcd,
    files: EtcdTLSConfig,
    discover: Any,
    eventually: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path(files.ca).write_bytes(new_authority().certificate)
    discovery = discover(etcd, files)
    await eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in (discovery.problem or ""))
    Path(files.ca).write_text("broken")  # refused: the last good one stays, and goes on failing
    await eventually(lambda: "the last good ones stay" in caplog.text)
    Path(files.ca).write_bytes(etcd.authority.certificate)
    await eventually(lambda: discovery.registered_once)


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_a_missing_file_is_refused_by_name(name: str, files: EtcdTLSConfig) -> None:
    Path(getattr(files, name)).unlink()
    with pytest.raises(ConfigError, match=rf"discovery\.tls\.{name}: .* cannot be read"):
        EtcdCredentials(files)


def test_a_certificate_without_its_key_is_refused(files: EtcdTLSConfig) -> None:
    with pytest.raises(ConfigError, match=r"discovery\.tls: certificate and key belong together"):
        EtcdCredentials(EtcdTLSConfig(ca=files.ca, certificate=files.certificate))


def test_the_authority_alone_is_enough_for_a_channel(files: EtcdTLSConfig) -> None:
    assert EtcdCredentials(EtcdTLSConfig(ca=files.ca)).channel() is not None
