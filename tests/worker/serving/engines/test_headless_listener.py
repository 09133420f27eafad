"""Connections to a head: certificates, hellos and frames that are wrong, and one
engine too many.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from pdcluster_schema.ports import WORKER_NAME
from pdcluster_worker.config.worker import (
    TLSConfig,
)
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.headless import (
    HELLO_BYTES,
    VERSION,
    HeadConnectionError,
    HeadHello,
    HeadReply,
    client_context,
    decode_answer,
    encode,
    read_frame,
    write_frame,
)
from pdcluster_worker.messages.engine import Ping, decode_inputs
from pdcluster_worker.serving.engines import headless_listener
from pdcluster_worker.serving.engines.group import EngineGroup
from pdcluster_worker.serving.engines.headless_listener import HeadlessListener
from tests.system.certificates import make_certificates
from tests.worker.serving.doubles import config_of

HELLO = HeadHello(VERSION, "c", "r1", "mixed", "node-b", "127.0.0.1")


class Line:
    """A connection to the door."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.reader, self.writer = streams

    @classmethod
    async def open(cls, door: HeadlessListener, context: ssl.SSLContext) -> "Line":
        return cls(
            await asyncio.open_connection(
                "127.0.0.1", door.port, ssl=context, server_hostname=WORKER_NAME
            )
        )

    async def request_credits(self, hello: HeadHello) -> HeadReply:
        write_frame(self.writer, encode(hello))
        return decode_answer(await asyncio.wait_for(read_frame(self.reader), 5))

    async def ended(self) -> bool:
        with pytest.raises(HeadConnectionError):
            await asyncio.wait_for(read_frame(self.reader), 5)
        self.writer.close()
        return True


def group_of(size: int) -> EngineGroup:
    return EngineGroup(size, lambda rank: SimpleNamespace(rank=rank), str)


@pytest.fixture
async def door(tls: TLSConfig) -> AsyncIterator[HeadlessListener]:
    door = HeadlessListener(config_of(tls, "mixed"), "float32", group_of(1))
    await door.open(0)
    yield door
    await door.close()


async def test_engine_of_the_cluster_gets_the_dtype_to_compute_in(door, tls):
    queue = await Line.open(door, client_context(tls))

    assert await queue.request_credits(HELLO) == HeadReply(dtype="float32")
    queue.writer.close()


async def test_engine_that_loads_gets_signs_of_life_of_its_head(door, tls, monkeypatch):
    """It takes a head that says nothing for one that is gone, and a large model loads
    for minutes.
    """
    monkeypatch.setattr(headless_listener, "CALL_SECONDS", 0.01)
    queue = await Line.open(door, client_context(tls))
    await queue.request_credits(HELLO)

    for _ in range(3):
        assert decode_inputs(await asyncio.wait_for(read_frame(queue.reader), 5)) == [Ping()]
    queue.writer.close()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("version", 1, f"its version is 1, the head's {VERSION}"),
        ("cluster", "d", "its cluster is 'd', the head's 'c'"),
        ("revision", "r2", "its revision is 'r2', the head's 'r1'"),
        ("role", "decode", "its role is 'decode', the head's 'mixed'"),
    ],
)
async def test_engine_that_is_not_of_the_head_is_refused_with_the_reason(
    door, tls, field, value, reason
):
    hello = HeadHello(
        **{name: getattr(HELLO, name) for name in HELLO.__struct_fields__} | {field: value}
    )
    queue = await Line.open(door, client_context(tls))

    assert await queue.request_credits(hello) == HeadReply(refused=reason)
    assert await queue.ended()


async def test_one_engine_too_many_is_refused(tls):
    door = HeadlessListener(config_of(tls, "mixed", data_parallel_size=8), "float32", group_of(8))
    await door.open(0)
    queue = await Line.open(door, client_context(tls))

    assert (
        await queue.request_credits(HELLO)
    ).refused == "the head has 8 engines and others on nodes, at most 8 together"
    queue.writer.close()
    await door.close()


async def test_stranger_gets_no_further_than_tls(door, tls, tmp_path):
    """Without a certificate, and with one of another authority."""
    nameless = ssl.create_default_context(cafile=tls.ca)
    foreign = TLSConfig(**make_certificates(tmp_path / "theirs").settings())
    other = ssl.create_default_context(cafile=tls.ca)
    other.load_cert_chain(foreign.certificate, foreign.key)

    async def stranger(context: ssl.SSLContext) -> None:
        queue = await Line.open(door, context)
        await queue.request_credits(HELLO)

    for context in (nameless, other):
        with pytest.raises((ssl.SSLError, ConnectionError, HeadConnectionError)):
            await stranger(context)


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", (HELLO_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\3abc"]
)
async def test_nonsense_ends_the_connection(door, tls, data):
    queue = await Line.open(door, client_context(tls))
    queue.writer.write(data)

    assert await queue.ended()


async def test_silence_ends_the_connection(door, tls, monkeypatch):
    monkeypatch.setattr(headless_listener, "HELLO_SECONDS", 0.0)
    queue = await Line.open(door, client_context(tls))

    assert await queue.ended()


async def test_port_in_use_is_a_wrong_setting(door, tls):
    with pytest.raises(
        ConfigError, match=rf"listen\.head: cannot listen on 127\.0\.0\.1:{door.port}"
    ):
        await HeadlessListener(config_of(tls, "mixed"), "float32", group_of(1)).open(door.port)
