"""Bytes between two KV ports, both ways, as a socket between them sees them."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdcluster_worker.kv_transfer.tcp import TcpSettings, TcpTransport
from tests.golden import records
from tests.worker.fake_runner import FakeRunner

RECORD = Path(__file__).parent / "records" / "kv_port.txt"
EPOCH, UNKNOWN = b"e" * 16, b"u" * 16
DEADLINE_SECONDS = 20


class Tap:
    """Hands on one connection to a port, and keeps what passes."""

    def __init__(self, port: int) -> None:
        self.there, self.back = bytearray(), bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with (
            self._listener.accept()[0] as sender,
            socket.create_connection(("127.0.0.1", self._port)) as receiver,
        ):
            back = threading.Thread(target=_pump, args=(receiver, sender, self.back))
            back.start()
            _pump(sender, receiver, self.there)
            back.join()

    def close(self) -> None:
        """After both ends have closed."""
        self._thread.join(DEADLINE_SECONDS)
        self._listener.close()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    while data := source.recv(1 << 16):
        kept += data
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


@contextmanager
def _engine(engine_id: str, first: int) -> Iterator[tuple[FakeRunner, TcpTransport]]:
    """An engine of four blocks of 16 bytes, each full of one number, and its KV port."""
    memory = FakeRunner(4, 2)
    for block in range(4):
        memory.block(block)[:] = bytes([first + block]) * memory.block_bytes
    settings = TcpSettings(verify=True)
    transport = TcpTransport(memory, engine_id, ("127.0.0.1", 0), lambda: None, settings)
    yield memory, transport
    transport.close()


def _events(transport: TcpTransport, count: int) -> list[str]:
    """Names of the next events."""
    names: list[str] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(names) < count:
        assert time.monotonic() < deadline, names
        names += [type(event).__name__ for event in transport.poll()]
        time.sleep(0.001)
    return names


def _lines(direction: str, data: bytes) -> list[str]:
    return [f"{direction} {data[at : at + 32].hex(' ')}" for at in range(0, len(data), 32)]


def test_bytes_of_a_transfer_and_of_a_refused_one() -> None:
    with ExitStack() as stack:
        _, prefill = stack.enter_context(_engine("prefill", 0x10))
        memory, decode = stack.enter_context(_engine("decode", 0x20))
        tap = Tap(decode.ports[0])
        decode.open(EPOCH, [3, 1])
        prefill.write(EPOCH, "decode", [tap.address], [(0, 3), (2, 1)])
        _events(prefill, 1)
        prefill.write(UNKNOWN, "decode", [tap.address], [(0, 3)])
        _events(prefill, 1)
        decode.fence(EPOCH)
        _events(decode, 1)
        kept = [memory.block(block)[:1].hex() for block in range(4)]
    tap.close()

    assert kept == ["20", "12", "22", "10"]
    lines = [*_lines("prefill", bytes(tap.there)), *_lines("decode ", bytes(tap.back))]
    records.check(RECORD, "\n".join(lines) + "\n")
