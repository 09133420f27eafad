"""Certificates of a worker: what is refused at the start, and what changes while it runs."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.peers import tls
from pdcluster_worker.peers.tls import Credentials
from tests.authorities import Pair, new_authority, worker_pair

BROKEN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ": .*tls.pem cannot be read"),
        (b"\x00garbage", ": .* is not a PEM file"),
        (BROKEN, ""),
    ],
    ids=["missing", "no PEM", "broken"],
)
def test_file_that_is_none_is_refused_by_name(
    authority: Any, tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / "tls.pem"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"tls\.{name}{words}" if words else "tls"):
        Credentials(msgspec.structs.replace(authority.issue(), **{name: str(path)}))


def test_key_of_another_certificate_is_refused(authority: Any) -> None:
    config = msgspec.structs.replace(authority.issue(), key=authority.issue().key)

    with pytest.raises(ConfigError, match="not a certificate and its key"):
        Credentials(config)


OLD, NEW, STRANGER = new_authority(), new_authority(), new_authority()
BOTH = OLD.certificate + NEW.certificate


class Files:
    """The mounted files of one worker, swapped as the operator swaps them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.config = TLSConfig(
            ca=str(folder / "ca.crt"),
            certificate=str(folder / "tls.crt"),
            key=str(folder / "tls.key"),
        )
        self.write(OLD.certificate, OLD)

    def write(self, ca: bytes, signer: Pair) -> None:
        """Accept `ca`, show a certificate of `signer`."""
        leaf = worker_pair(signer)
        for path, content in (
            (self.config.ca, ca),
            (self.config.certificate, leaf.certificate),
            (self.config.key, leaf.key),
        ):
            Path(path).write_bytes(content)


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], Files]:
    return lambda name: Files(tmp_path / name)


@pytest.fixture
async def pair(worker: Any, files: Any) -> Any:
    """(decode worker, prefill worker, files and credentials of both), with files of their own."""
    ends = [files(name) for name in ("d", "p")]
    creds = [Credentials(one.config) for one in ends]
    d, p = await worker("d", "decode", creds=creds[0]), await worker("p", "prefill", creds=creds[1])
    return d, p, ends, creds


async def connect(d: Any, p: Any, eventually: Any) -> None:
    d.sees(p)
    await eventually(lambda: [peer.key for peer in d.directory.prefills()] == ["p"])


STAGES = [(OLD.certificate, OLD), (BOTH, OLD), (BOTH, NEW), (NEW.certificate, NEW)]


async def test_no_stage_of_a_rotation_refuses_a_connection(pair: Any, eventually: Any) -> None:
    d, p, ends, creds = pair
    await connect(d, p, eventually)
    for stage in STAGES[1:]:
        # one worker after the other: in between they differ
        for one, credentials in zip(ends, creds, strict=True):
            one.write(*stage)
            assert credentials.reload() is True
            # a probe opens a connection of its own, with new handshakes
            assert await d.directory.probe(p.record), stage
    assert d.lost == []  # the connection that stood was left alone all the while


async def test_a_lost_peer_comes_back_on_a_channel_with_the_new_certificate(
    pair: Any, worker: Any, eventually: Any
) -> None:
    d, p, ends, creds = pair
    await connect(d, p, eventually)
    for one, credentials in zip(ends, creds, strict=True):
        one.write(NEW.certificate, NEW)
        credentials.reload()
    port = int(p.record.grpc_address.rpartition(":")[2])
    await p.server.stop(None)
    await eventually(lambda: d.lost == ["p"])

    again = await worker("p", "prefill", creds=creds[1], port=port)
    await eventually(lambda: [peer.key for peer in d.directory.prefills()] == ["p"])
    await eventually(lambda: again.handler.watches == 1)  # it is ready a moment sooner


async def test_an_end_that_has_not_reloaded_is_refused_by_one_that_has_moved_on(
    pair: Any, eventually: Any
) -> None:
    d, p, ends, creds = pair
    ends[1].write(NEW.certificate, NEW)
    creds[1].reload()
    assert await d.directory.probe(p.record) is False
    ends[0].write(BOTH, NEW)
    creds[0].reload()
    assert await d.directory.probe(p.record) is True


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
@pytest.mark.parametrize(
    "content",
    [b"", BROKEN, STRANGER.key, None],
)
async def test_a_broken_file_keeps_the_last_good_ones(
    name: str, content: bytes | None, pair: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    d, p, ends, creds = pair
    path = Path(getattr(ends[1].config, name))
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        assert (creds[1].reload(), creds[1].reload()) == (False, False)
    assert caplog.text.count("the last good ones stay") == 1
    assert await d.directory.probe(p.record) is True

    ends[1].write(BOTH, OLD)
    assert creds[1].reload() is True
    assert await d.directory.probe(p.record) is True


async def test_files_are_followed(
    pair: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.01)
    _, _, ends, creds = pair
    before = creds[0].channel
    following = asyncio.create_task(creds[0].watch())
    ends[0].write(BOTH, NEW)
    await eventually(lambda: creds[0].channel is not before)
    following.cancel()
