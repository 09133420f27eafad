"""Two engines' transports over plain bytearrays: real sockets on 127.0.0.1, or the local fabric;
nothing is mocked.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pdcluster_worker.engine.ports import TransferEvent
from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.kv_transfer.tcp import TcpSettings, TcpTransport
from pdcluster_worker.messages.facts import KVGeometry
from tests.transports import need_transport
from tests.worker.local_transport import LocalFabric, LocalTransport

if TYPE_CHECKING:
    from pdcluster_worker.model.kv_cache import DeviceKVCache

BLOCK_BYTES = 4096
NUM_BLOCKS = 16
DEADLINE_SECONDS = 20.0


class ByteMemory:
    """KVMemory over one bytearray, filled with random bytes; with several heads one
    rank's, or all.
    """

    def __init__(
        self, block_bytes: int = BLOCK_BYTES, num_blocks: int = NUM_BLOCKS, heads: range = range(1)
    ) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.heads = heads
        self.head_bytes = block_bytes // len(heads)
        self._data = bytearray(os.urandom(block_bytes * num_blocks))

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        held = heads or self.heads
        start = block_id * self.block_bytes + (held.start - self.heads.start) * self.head_bytes
        return memoryview(self._data)[start : start + len(held) * self.head_bytes]

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        return self.block(block_id, heads)

    def write_block(
        self, block_id: int, staging: memoryview, heads: range | None = None
    ) -> None: ...


NUM_HEADS, HEAD_BYTES = 4, 16


def rank_memory(heads: range) -> ByteMemory:
    """The memory of one rank, of a model with NUM_HEADS heads of HEAD_BYTES a block."""
    return ByteMemory(len(heads) * HEAD_BYTES, 8, heads)


def device_cache() -> "DeviceKVCache":
    """As many blocks of as many bytes on a device, filled with random numbers: NIXL's slots are
    there too.  The device is the CPU.
    """
    # here, since writers in processes of their own need no torch
    import torch

    from pdcluster_worker.model.kv_cache import DeviceKVCache

    geometry = KVGeometry(1, head_dim=64, num_layers=2, block_size=4, dtype="float32")
    cache = DeviceKVCache(geometry, NUM_BLOCKS, torch.device("cpu"))
    cache.tensor.normal_()
    assert cache.block_bytes == BLOCK_BYTES
    return cache


class Engine:
    """A transport, its memory and the events that it has given so far."""

    def __init__(self, engine_id: str, memory: "ByteMemory | DeviceKVCache") -> None:
        self.engine_id = engine_id
        self.memory = memory
        self.awake = threading.Event()
        self.transport: TcpTransport | LocalTransport
        self.events: list[TransferEvent] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.transport.ports[0]}"

    def write(self, epoch: bytes, to: "Engine", pairs: list[tuple[int, int]]) -> None:
        self.transport.write(epoch, to.engine_id, [to.address], pairs)

    def wait(self, is_done: Callable[[list[TransferEvent]], bool]) -> list[TransferEvent]:
        """Collect events until `is_done(all events)`, as an engine loop does: asleep
        until woken.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            self.awake.clear()
            self.events += self.transport.poll()
            if is_done(self.events):
                return self.events
            assert self.awake.wait(deadline - time.monotonic()), f"only {self.events}"

    def wait_for(self, kind: type[TransferEvent], count: int = 1) -> list[TransferEvent]:
        """The events of this kind once there are `count`."""
        return [
            event
            for event in self.wait(lambda events: sum(isinstance(e, kind) for e in events) >= count)
            if isinstance(event, kind)
        ]

    def wait_sent(self, count: int) -> list[int]:
        """Wait until this many blocks have been acknowledged; returns them."""
        events = self.wait(
            lambda events: sum(len(getattr(event, "block_ids", ())) for event in events) >= count
        )
        return [block for event in events for block in getattr(event, "block_ids", ())]


def read(sock: socket.socket, decode: Callable[[bytes], Any]) -> Any:
    """The next message of a raw socket."""
    data = b""
    while isinstance(message := decode(data), int):
        chunk = sock.recv(message)
        assert chunk, "closed by the other side"
        data += chunk
    return message


class RawPeer:
    """A socket to a KV port, and the frames that a sender would put on it."""

    def __init__(self, engine: Engine, source: str = "127.0.0.1") -> None:
        address = ("127.0.0.1", engine.transport.ports[0])
        self.sock = socket.create_connection(
            address, timeout=DEADLINE_SECONDS, source_address=(source, 0)
        )
        self.block_bytes = engine.memory.block_bytes

    def hello(self, engine_id: str = "decode") -> wire.Reply:
        self.sock.sendall(wire.encode_hello(wire.KvHello(engine_id)))
        return self.read(wire.decode_reply)

    def header(
        self, epoch: bytes, block_ids: Sequence[int], payload_bytes: int | None = None
    ) -> None:
        size = len(block_ids) * self.block_bytes if payload_bytes is None else payload_bytes
        self.sock.sendall(wire.encode_header(wire.Header(epoch, range(1), tuple(block_ids), size)))

    def frame(self, epoch: bytes, block_ids: Sequence[int], payload: bytes) -> wire.Ack:
        self.header(epoch, block_ids, len(payload))
        self.sock.sendall(payload)
        return self.read(wire.decode_ack)

    def read(self, decode: Callable[[bytes], Any]) -> Any:
        return read(self.sock, decode)

    def is_closed(self) -> bool:
        """Waits until the other side has closed."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def tcp_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines with a TcpTransport; closes them."""
    engines: list[Engine] = []

    def make(
        engine_id: str, block_bytes: int = BLOCK_BYTES, num_blocks: int = NUM_BLOCKS, **options: Any
    ) -> Engine:
        memory = options.pop("memory", None) or ByteMemory(block_bytes, num_blocks)
        engine = Engine(engine_id, memory)
        host, port = options.pop("host", "127.0.0.1"), options.pop("port", 0)
        engine.transport = TcpTransport(
            engine.memory, engine_id, (host, port), engine.awake.set, TcpSettings(**options)
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.transport.close()


@pytest.fixture
def raw_peer() -> Iterator[Callable[..., RawPeer]]:
    """Connects raw sockets to engines' KV ports; closes them."""
    peers: list[RawPeer] = []

    def connect(engine: Engine, **options: str) -> RawPeer:
        peers.append(RawPeer(engine, **options))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.sock.close()


@pytest.fixture(params=["tcp", "local", "nixl", "nixl on a device", "ucx"])
def way(request: pytest.FixtureRequest) -> str:
    """Each transport, and that with blocks and slots on a device."""
    return str(request.param)


@pytest.fixture
def transport(way: str) -> str:
    """The one of `way`, if it is there."""
    return need_transport(way.split()[0])


MakePair = Callable[..., tuple[Engine, Engine]]


@pytest.fixture
def make_pair(way: str, transport: str, tcp_engine: Callable[..., Engine]) -> Iterator[MakePair]:
    """Makes (prefill, decode), a writer and a receiver over each transport; closes them."""
    fabric, made = LocalFabric(), list[Engine]()

    def make(*, verify: bool) -> tuple[Engine, Engine]:
        if transport != "local":
            options = {"verify": verify, "transport": transport}
            memory = device_cache if way.endswith("device") else ByteMemory
            prefill = tcp_engine("prefill", memory=memory(), **options)
            return prefill, tcp_engine("decode", memory=memory(), **options)
        pair = Engine("prefill", ByteMemory()), Engine("decode", ByteMemory())
        for engine in pair:
            engine.transport = LocalTransport(
                fabric, [engine.memory], engine.engine_id, engine.awake.set, verify=verify
            )
            made.append(engine)
        return pair

    yield make
    for engine in made:
        engine.transport.close()


@pytest.fixture
def pair(make_pair: MakePair) -> tuple[Engine, Engine]:
    """A pair with verification on."""
    return make_pair(verify=True)


@pytest.fixture
def epoch() -> bytes:
    return os.urandom(16)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Polls a condition that no event announces, with a deadline."""

    def wait(is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return wait
