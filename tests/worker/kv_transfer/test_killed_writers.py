"""A writer that is killed in a transfer, again and again, and comes back at its address.

Each time the next one writes by the same transport, nothing of the last one is used, and the
receiver keeps no memory of those that are gone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from pdcluster_worker.engine.ports import Fenced
from tests.ports import free_port
from tests.transports import need_transport
from tests.worker.kv_transfer.conftest import Engine
from tests.worker.kv_transfer.writer_process import BLOCK_BYTES, NUM_BLOCKS

NUM_WRITERS = 10
NUM_FIRST = 3
"""Writers until the receiver has what it needs for any of them."""

MAX_GROWTH = 1 << 20
"""Bytes for each later one; a slot that is not used again has 2 MiB."""


def write_and_die(decode: Engine, transport: str, port: int) -> None:
    """One life of the writer: its short transfer is right, its long one ends with it."""
    short, long = os.urandom(16), os.urandom(16)
    decode.transport.open(short, [0])
    decode.transport.open(long, list(range(1, NUM_BLOCKS)))
    command = [
        sys.executable,
        "-m",
        "tests.worker.kv_transfer.writer_process",
        transport,
        str(port),
    ]
    arguments = [decode.engine_id, decode.address, short.hex(), long.hex()]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        route, checksum = writer.stdout.readline().split()
        begun = writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    assert (route, begun) == (transport, "begun\n")
    decode.events.clear()
    for epoch in (short, long):
        decode.transport.fence(epoch)
    fenced = {event.epoch: event for event in decode.wait_for(Fenced, 2)}
    assert fenced[short].checksum == int(checksum)
    assert 0 < len(fenced[long].received) < NUM_BLOCKS - 1


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucx"])
def test_writers_that_are_killed_leave_nothing_behind(
    transport: str, tcp_engine: Callable[..., Engine]
) -> None:
    decode = tcp_engine(
        "decode", BLOCK_BYTES, NUM_BLOCKS, verify=True, transport=need_transport(transport)
    )
    port, used = free_port(), list[int]()
    for _ in range(NUM_WRITERS):
        write_and_die(decode, transport, port)
        used.append(psutil.Process().memory_info().rss)

    grown = used[-1] - used[NUM_FIRST - 1]
    assert grown < MAX_GROWTH * (NUM_WRITERS - NUM_FIRST)
