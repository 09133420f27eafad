"""GB/s of KV from one process's device cache to another's, idle and while both compute, beside a
copy by CUDA IPC and a raw socket.

Both processes share this machine's one device.  Blocks are those of an 8B llama, 2 MiB.
`waits`: as it was, when a copy waited for the steps queued before it.  `nixl` is measured where it
is installed.
"""

import multiprocessing as mp
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from setting import DEVICE, REHEARSES, save, synchronize

from pdcluster_worker.engine.ports import BlocksSent, Fenced, SendEnded
from pdcluster_worker.kv_transfer.carriers import TransportName
from pdcluster_worker.kv_transfer.sharded import ShardedTransport
from pdcluster_worker.kv_transfer.tcp import TcpPort, TcpSettings
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import DeviceKVCache

GEOMETRY = KVGeometry(8, 128, 2 if REHEARSES else 32, 16, "bfloat16")
BLOCKS = 16 if REHEARSES else 512
ROUNDS = 1 if REHEARSES else 3
FEW = 16
"""Blocks of a transfer whose copies wait for steps."""
STEP_SECONDS = 0.02
OPTIONAL = {"nixl"}
"""Figures without which the part has not failed."""


class WaitingCache(DeviceKVCache):
    """A cache whose copies wait for the default stream, as they did before."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See DeviceKVCache."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        super().copy(target, source)


class Side:
    """A KV port over a device cache, and its events."""

    def __init__(self, name: str, over: TransportName, *, waits: bool) -> None:
        self.cache = (WaitingCache if waits else DeviceKVCache)(GEOMETRY, BLOCKS, DEVICE)
        synchronize()
        self.awake = threading.Event()
        settings = TcpSettings(transport=over)
        port = TcpPort(self.cache, name, ("127.0.0.1", 0), self.awake.set, settings)
        self.transport = ShardedTransport([port], self.awake.set)
        self.address = f"127.0.0.1:{port.port}"

    def wait(self, is_last: Any) -> Any:
        """The first event of which that holds."""
        while True:
            self.awake.clear()
            for event in self.transport.poll():
                if isinstance(event, SendEnded):
                    raise RuntimeError(event.reason)
                if isinstance(event, BlocksSent) and event.route.note:
                    raise RuntimeError(event.route.note)
                if is_last(event):
                    return event
            self.awake.wait(10)


@contextmanager
def computing(busy: bool) -> Iterator[None]:
    """Steps of 20 ms on the default stream, with one queued ahead, as a runner has them."""
    if not busy or REHEARSES:
        yield
        return
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    ends = threading.Event()
    products = max(1, round(STEP_SECONDS / 1.5e-3))

    def compute() -> None:
        queued: list[Any] = []
        while not ends.is_set():
            for _ in range(products):
                a @ a
            done = torch.cuda.Event()
            done.record()
            queued.append(done)
            if len(queued) == 2:
                queued.pop(0).synchronize()

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        ends.set()
        thread.join()
        synchronize()


def blocks_of(waits: bool) -> int:
    """Blocks of one transfer."""
    return FEW if waits else BLOCKS


def receive(line: Connection, over: TransportName, waits: bool) -> None:
    """The decode side, in a process of its own."""
    side = Side("decode", over, waits=waits)
    line.send(side.address)
    while (message := line.recv()) is not None:
        epoch, busy = message
        side.transport.open(epoch, list(range(blocks_of(waits))))
        with computing(busy):
            line.send(None)
            line.recv()
        side.transport.fence(epoch)
        fenced = side.wait(lambda event: isinstance(event, Fenced))
        line.send(len(fenced.received))
    side.transport.close()


def through_the_port(over: TransportName, *, waits: bool) -> dict[str, float]:
    """GB/s, idle and while both sides compute; the bytes that arrived are checked by the block."""
    context = mp.get_context("spawn")
    line, theirs = context.Pipe()
    peer = context.Process(target=receive, args=(theirs, over, waits), daemon=True)
    peer.start()
    side = Side("prefill", over, waits=waits)
    address = line.recv()
    found: dict[str, float] = {}
    for busy in (False, True):
        rates = [_move(side, line, address, (blocks_of(waits), busy)) for _ in range(ROUNDS)]
        found["busy" if busy else "idle"] = round(statistics.median(rates), 3)
    line.send(None)
    peer.join(20)
    side.transport.close()
    return found


def _move(side: Side, line: Connection, address: str, setting: tuple[int, bool]) -> float:
    count, busy = setting
    epoch = os.urandom(16)
    line.send((epoch, busy))
    line.recv()
    num_sent = 0

    def is_last(event: Any) -> bool:
        nonlocal num_sent
        num_sent += len(event.block_ids) if isinstance(event, BlocksSent) else 0
        return num_sent == count

    with computing(busy):
        started = time.perf_counter()
        side.transport.write(epoch, "decode", [address], [(block, block) for block in range(count)])
        side.wait(is_last)
        seconds = time.perf_counter() - started
    side.transport.forget(epoch)
    line.send(None)
    assert line.recv() == count, "blocks are missing"
    return count * side.cache.block_bytes / seconds / 1e9


def by_ipc() -> float:
    """GB/s of a copy from another process's memory of the device, mapped here."""
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    size = 1 << 20 if REHEARSES else 1 << 30
    peer = context.Process(target=_share, args=(queue, done, size), daemon=True)
    peer.start()
    source = queue.get(timeout=60)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize()
    started = time.perf_counter()
    for _ in range(3):
        target.copy_(source)
    synchronize()
    rate = 3 * size / (time.perf_counter() - started) / 1e9
    done.set()
    del source
    peer.join(20)
    return round(rate, 1)


def _share(queue: Any, done: Any, size: int) -> None:
    memory = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    queue.put(memory)
    done.wait(60)


def by_socket() -> float:
    """GB/s of host memory over loopback, between two threads."""
    server = socket.create_server(("127.0.0.1", 0))
    size, data = (1 << 24 if REHEARSES else 1 << 30), bytearray(1 << 21)

    def send() -> None:
        with socket.create_connection(server.getsockname()) as sock:
            for _ in range(size // len(data)):
                sock.sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    connection, _ = server.accept()
    buffer, got, started = bytearray(1 << 21), 0, time.perf_counter()
    while got < size:
        got += connection.recv_into(buffer)
    rate = size / (time.perf_counter() - started) / 1e9
    thread.join()
    return round(rate, 2)


def pinned_copies() -> dict[str, float]:
    """GB/s of one block between device and pinned memory, as the staging copies it."""
    cache = DeviceKVCache(GEOMETRY, BLOCKS, DEVICE)
    synchronize()
    staging, found = cache.staging(1), {}
    for name, work in (
        ("block", lambda: cache.block(1)),
        ("land", lambda: cache.write_block(1, staging)),
    ):
        work()
        started = time.perf_counter()
        for _ in range(50):
            work()
        rate = 50 * cache.block_bytes / (time.perf_counter() - started) / 1e9
        found[name] = round(rate, 2)
    return found


def main() -> int:
    """A line for each way."""
    figures: dict[str, Any] = {}
    for name, work in (
        ("copies of a block", pinned_copies),
        ("tcp", lambda: through_the_port("tcp", waits=False)),
        ("tcp, waits", lambda: through_the_port("tcp", waits=True)),
        ("nixl", lambda: through_the_port("nixl", waits=False)),
        ("CUDA IPC", by_ipc),
        ("raw socket", by_socket),
    ):
        try:
            figures[name] = work()
        except Exception as e:  # the others are measured all the same
            figures[name] = f"{type(e).__name__}: {e}"
        print(name, figures[name], flush=True)
        save(figures)
    return int(any(isinstance(figures[name], str) for name in figures.keys() - OPTIONAL))


if __name__ == "__main__":
    sys.exit(main())
