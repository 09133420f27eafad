"""Engines whose ranks have a KV port each, over real sockets; another rank is a thread here, behind
its line.
"""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdcluster_worker.engine.ports import (
    BlocksSent,
    EngineBrokenError,
    Fenced,
    SendEnded,
    TransferRoute,
)
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.kv_transfer.carriers import TransportName
from pdcluster_worker.kv_transfer.rank_port import Listen, RankPort, serve_in_thread
from pdcluster_worker.kv_transfer.sharded import shares
from pdcluster_worker.kv_transfer.tcp import TcpSettings, TcpTransport
from tests.transports import need_transport
from tests.worker.kv_transfer.conftest import HEAD_BYTES, NUM_HEADS, Engine, rank_memory


class RankEngine(Engine):
    """Rank 0 in this thread, the others behind lines."""

    def __init__(
        self,
        engine_id: str,
        num_ranks: int,
        bandwidth: int = 0,
        *,
        verify: bool = True,
        transport: TransportName = "tcp",
    ) -> None:
        self.memories = [rank_memory(heads) for heads in shares(NUM_HEADS, num_ranks)]
        super().__init__(engine_id, self.memories[0])
        self.lines = [socket.socketpair() for _ in self.memories[1:]]
        listen = Listen(engine_id, "127.0.0.1", 0, verify, bandwidth, transport)
        others: list[RankPort] = []
        for memory, (ours, theirs) in zip(self.memories[1:], self.lines, strict=True):
            serve_in_thread(theirs, memory)
            others.append(RankPort(ours, memory.heads, memory.block_bytes, self.awake.set, listen))
        settings = TcpSettings(verify=verify, bandwidth=bandwidth, transport=transport)
        self.transport = TcpTransport(
            self.memory, engine_id, ("127.0.0.1", 0), self.awake.set, settings, others=others
        )
        self.addresses = [f"127.0.0.1:{port}" for port in self.transport.ports]

    def block(self, block_id: int) -> bytes:
        return b"".join(memory.block(block_id) for memory in self.memories)

    def wait_fenced(self) -> Fenced:
        event = self.wait_for(Fenced)[-1]
        assert isinstance(event, Fenced)
        return event


@pytest.fixture
def engine_of() -> Iterator[Callable[..., RankEngine]]:
    engines: list[RankEngine] = []

    def make(engine_id: str, num_ranks: int, bandwidth: int = 0, **options: Any) -> RankEngine:
        engines.append(RankEngine(engine_id, num_ranks, bandwidth, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.transport.close()


MakeEngine = Callable[..., RankEngine]


def test_every_rank_verifies_an_epoch_that_asks_for_it(engine_of: MakeEngine, epoch: bytes) -> None:
    prefill, decode = engine_of("p", 2, verify=False), engine_of("d", 2, verify=False)
    decode.transport.open(epoch, [5], verify=True)
    prefill.transport.write(epoch, "d", decode.addresses, [(0, 5)], verify=True)
    prefill.wait_sent(1)
    checksum = prefill.transport.checksum(epoch)
    decode.transport.fence(epoch)

    assert checksum is not None
    assert decode.wait_fenced().checksum == checksum


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "transport"),
    [
        *((2, 1, "tcp"), (1, 2, "tcp"), (4, 2, "tcp"), (2, 2, "tcp")),
        *((2, 1, "nixl"), (1, 2, "nixl"), (2, 1, "ucx"), (1, 2, "ucx")),
    ],
)
def test_ranks_write_their_heads_to_the_ports_that_take_them(
    engine_of: MakeEngine, epoch: bytes, prefill_size: int, decode_size: int, transport: str
) -> None:
    options = {"transport": need_transport(transport)}
    prefill, decode = (
        engine_of("p", prefill_size, **options),
        engine_of("d", decode_size, **options),
    )
    assert len(set(decode.addresses)) == decode_size
    for turn in range(2):
        key = bytes([turn]) + epoch[1:]
        decode.transport.open(key, [5, 6, 7])
        prefill.transport.write(key, "d", decode.addresses, [(0, 5), (1, 6), (2, 7)])
        assert prefill.wait_sent(3 * (turn + 1))[-3:] == [0, 1, 2]
        assert {event.route for event in prefill.events if isinstance(event, BlocksSent)} == {
            TransferRoute(transport)
        }
        checksum = prefill.transport.checksum(key)
        prefill.transport.forget(key)
        decode.transport.fence(key)
        fenced = decode.wait_fenced()

        assert (fenced.received, fenced.num_bytes) == ({5, 6, 7}, 3 * NUM_HEADS * HEAD_BYTES)
        assert fenced.checksum == checksum
        assert checksum is not None
        assert [decode.block(block) for block in (5, 6, 7)] == [
            prefill.block(block) for block in (0, 1, 2)
        ]
        decode.events.clear()


def test_cancel_reaches_the_other_ranks(engine_of: MakeEngine, epoch: bytes) -> None:
    prefill, decode = engine_of("p", 2, bandwidth=1), engine_of("d", 1)
    decode.transport.open(epoch, [1, 2])
    prefill.transport.write(epoch, "d", decode.addresses, [(0, 1), (3, 2)])
    prefill.transport.cancel(epoch)  # before the second block may be sent

    assert prefill.wait(lambda events: any(isinstance(event, SendEnded) for event in events))[
        -1
    ] == SendEnded(epoch, "cancelled")


def test_a_rank_that_is_gone_breaks_the_engine_and_answers_no_fence(
    engine_of: MakeEngine, epoch: bytes
) -> None:
    decode = engine_of("d", 2)
    decode.transport.open(epoch, [1])
    decode.lines[0][1].shutdown(socket.SHUT_RDWR)

    with pytest.raises(EngineBrokenError, match="rank of KV heads 2 to 3 is gone"):
        decode.transport.open(os.urandom(16), [2])
    with pytest.raises(EngineBrokenError, match="is gone"):
        decode.transport.fence(epoch)
    assert decode.transport.poll() == []


def test_a_port_that_a_rank_cannot_bind_is_refused_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as taken, ours:
        serve_in_thread(theirs, rank_memory(range(2, 4)))
        listen = Listen("d", "127.0.0.1", taken.getsockname()[1], False, 0, "tcp")
        with pytest.raises(ConfigError, match=r"already in use: choose another listen\.kv"):
            RankPort(ours, range(2, 4), HEAD_BYTES, lambda: None, listen)


def test_a_rank_that_ends_before_it_listens_is_gone() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(EngineBrokenError, match="is gone"):
        RankPort(
            ours,
            range(2, 4),
            HEAD_BYTES,
            lambda: None,
            Listen("d", "127.0.0.1", 0, False, 0, "tcp"),
        )
