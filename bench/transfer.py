"""GB/s of KV between two processes by each transport, beside a raw socket and NIXL by itself.

    bench/transfer.py [--rounds N] [--log]

Two processes of this machine, each with a KV port of one rank and blocks of SmolLM2-135M in
bfloat16 (360 KiB); rounds go through all in turn.  NIXL by itself reads frames of the same size
from registered memory, one at a time, since its own benchmark comes with no package.
Then the CPU time of both processes while nothing moves.  Wants the machine to itself.
"""

import argparse
import mmap
import multiprocessing as mp
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from layout import table
from setting import LOG_HELP, keep_report, setting_lines

from pdcluster_worker.engine.ports import BlocksSent, Fenced, SendEnded
from pdcluster_worker.kv_transfer.carrier import SENDING_SLOTS
from pdcluster_worker.kv_transfer.carriers import TransportName
from pdcluster_worker.kv_transfer.nixl_carrier import NixlCarrier
from pdcluster_worker.kv_transfer.sharded import ShardedTransport
from pdcluster_worker.kv_transfer.tcp import TcpPort, TcpSettings
from pdcluster_worker.kv_transfer.wire import FRAME_BYTES

BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 2
NUM_BLOCKS = 512
BLOCKS = 256
"""Blocks of one transfer: a prompt of 4096 tokens."""
IDLE_SECONDS = 5.0
TRANSPORTS: tuple[TransportName, ...] = ("tcp", "nixl", "ucx")


class Memory:
    """KV blocks of one head over one run of memory."""

    heads = range(1)
    head_bytes = BLOCK_BYTES
    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, BLOCK_BYTES * NUM_BLOCKS)
        self._bytes.write(os.urandom(BLOCK_BYTES) * NUM_BLOCKS)

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """See engine.ports.KVMemory."""
        start = block_id * BLOCK_BYTES
        return memoryview(self._bytes)[start : start + BLOCK_BYTES]

    staging = block

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Nothing is left to do."""


class Side:
    """A KV port and its events."""

    def __init__(self, name: str, transport: TransportName) -> None:
        self.awake = threading.Event()
        port = TcpPort(
            Memory(), name, ("127.0.0.1", 0), self.awake.set, TcpSettings(transport=transport)
        )
        self.transport = ShardedTransport([port], self.awake.set)
        self.address = f"127.0.0.1:{port.port}"

    def wait(self, is_last: Callable[[Any], bool]) -> Any:
        """The first event of which that holds."""
        while True:
            self.awake.clear()
            for event in self.transport.poll():
                if isinstance(event, SendEnded):
                    raise RuntimeError(event.reason)
                if is_last(event):
                    return event
            self.awake.wait(10)


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def receive(line: Connection, transport: TransportName) -> None:
    """The decode side, in a process of its own; answers what it is sent."""
    side = Side("decode", transport)
    line.send(side.address)
    while (epoch := line.recv()) is not None:
        if epoch == b"cpu":
            line.send(cpu_seconds())
            continue
        side.transport.open(epoch, list(range(BLOCKS)))
        line.send(None)
        line.recv()
        side.transport.fence(epoch)
        fenced = side.wait(lambda event: isinstance(event, Fenced))
        assert len(fenced.received) == BLOCKS
        line.send(None)
    side.transport.close()


class Ours:
    """A pair over one transport."""

    def __init__(self, transport: TransportName) -> None:
        self._name = transport
        self._line, theirs = mp.Pipe()
        self._peer = mp.Process(target=receive, args=(theirs, transport), daemon=True)
        self._peer.start()
        self._side = Side("prefill", transport)
        self._address = self._line.recv()

    def move(self) -> int:
        """Write the blocks of one prompt; returns their bytes."""
        epoch = os.urandom(16)
        self._ask(epoch)
        pairs = [(block, block) for block in range(BLOCKS)]
        self._side.transport.write(epoch, "decode", [self._address], pairs)
        num_sent = 0

        def is_last(event: Any) -> bool:
            nonlocal num_sent
            if isinstance(event, BlocksSent):
                assert event.route.transport == self._name, event.route
                num_sent += len(event.block_ids)
            return num_sent == BLOCKS

        self._side.wait(is_last)
        self._side.transport.forget(epoch)
        self._ask(None if epoch is None else b"fence")
        return BLOCKS * BLOCK_BYTES

    def cpu(self) -> float:
        """CPU time of both processes."""
        return float(self._ask(b"cpu")) + cpu_seconds()

    def close(self) -> None:
        """End both."""
        with suppress(BrokenPipeError):
            self._line.send(None)
        self._side.transport.close()
        self._peer.join(10)

    def _ask(self, message: bytes | None) -> Any:
        self._line.send(message)
        return self._line.recv()


def pour(line: Connection) -> None:
    """Send what is asked for over one socket."""
    memory = Memory()
    with socket.create_connection(("127.0.0.1", line.recv())) as sock:
        while line.recv():
            for block in range(BLOCKS):
                sock.sendall(memory.block(block))


class RawSocket:
    """The same bytes through a socket, without a protocol."""

    def __init__(self) -> None:
        self._line, theirs = mp.Pipe()
        mp.Process(target=pour, args=(theirs,), daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._line.send(listener.getsockname()[1])
            self._sock, _ = listener.accept()
        self._memory = Memory()

    def move(self) -> int:
        """Read the blocks of one prompt."""
        self._line.send(True)
        for block in range(BLOCKS):
            target = self._memory.block(block)
            while target:
                target = target[self._sock.recv_into(target) :]
        return BLOCKS * BLOCK_BYTES

    def close(self) -> None:
        """End both."""
        self._line.send(False)
        self._sock.close()


def offer(line: Connection) -> None:
    """Memory that NIXL reads."""
    carrier = NixlCarrier("offers", FRAME_BYTES, Memory())
    outgoing, slot = carrier.outgoing(), carrier.sending.take()
    assert slot is not None
    line.send((outgoing.blob, outgoing.post(slot, FRAME_BYTES)))
    line.recv()


class NixlAlone:
    """NIXL's reads of as many bytes, a frame at a time."""

    def __init__(self) -> None:
        self._line, theirs = mp.Pipe()
        mp.Process(target=offer, args=(theirs,), daemon=True).start()
        carrier = NixlCarrier("reads", FRAME_BYTES, Memory())
        blob, self._place = self._line.recv()
        self._incoming, self._slot = carrier.incoming(blob), carrier.receiving.take()

    def move(self) -> int:
        """Read the bytes of one prompt."""
        assert self._slot is not None
        count = BLOCKS * BLOCK_BYTES // FRAME_BYTES
        for _ in range(count):
            is_done = self._incoming.fetch(self._place, FRAME_BYTES, self._slot)
            while not is_done():
                time.sleep(20e-6)
        return count * FRAME_BYTES

    def close(self) -> None:
        """End both."""
        self._line.send(None)


@contextmanager
def opened(make: Callable[[], Any]) -> Iterator[Any]:
    """Open one, which ends with the block."""
    system = make()
    try:
        yield system
    finally:
        system.close()


def measured(rounds: int) -> dict[str, list[float]]:
    """GB/s of each round, by name; CPU seconds of both processes a GB; idle share of a core."""
    makers: dict[str, Callable[[], Any]] = {
        "raw socket": RawSocket,
        "NIXL by itself": NixlAlone,
        **{f"our {name}": partial(Ours, name) for name in TRANSPORTS},
    }
    rates: dict[str, list[float]] = {name: [] for name in makers}
    spent: dict[str, list[float]] = {name: [] for name in makers}
    with ExitStack() as stack:
        systems = {name: stack.enter_context(opened(make)) for name, make in makers.items()}
        for system in systems.values():
            system.move()  # connects
        for _ in range(rounds):
            for name, system in systems.items():
                before = system.cpu() if hasattr(system, "cpu") else 0.0
                start = time.perf_counter()
                num_bytes = system.move()
                rates[name].append(num_bytes / (time.perf_counter() - start) / 1e9)
                if before:
                    spent[name].append((system.cpu() - before) / num_bytes * 1e9)
    rows = [
        [
            name,
            f"{statistics.median(found):.2f} [{min(found):.2f} - {max(found):.2f}]",
            f"{statistics.median(spent[name]):.2f}" if spent[name] else "",
            idle(makers[name]) if name.startswith("our ") else "",
        ]
        for name, found in rates.items()
    ]
    header = ["", "GB/s", "CPU seconds of both a GB", "idle, % of a core, both"]
    print(table(header, rows))
    LINES.extend(table(header, rows).splitlines())
    return rates


LINES: list[str] = []


def idle(make: Callable[[], Any]) -> str:
    """Share of a core that a pair takes after a transfer, while nothing moves."""
    with opened(make) as pair:
        pair.move()
        before = pair.cpu()
        time.sleep(IDLE_SECONDS)
        return f"{(pair.cpu() - before) / IDLE_SECONDS:.2%}"


def main() -> int:
    """Print the table; with --log append it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    mp.set_start_method("spawn")
    load = os.getloadavg()[0]
    measured(options.rounds)
    frames = f"{BLOCKS} blocks of {BLOCK_BYTES >> 10} KiB a transfer, {SENDING_SLOTS} slots, "
    lines = [*setting_lines("bench/transfer.py", frames, load), "", *LINES]
    if options.log:
        keep_report("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
