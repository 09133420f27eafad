"""Processor time and memory of idle processes, as the kernel reports them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

SETTLE_SECONDS = 5.0
"""Pause after the last answer: threads that spin, collectors and logs come to rest."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A worker that has nothing to do.

    cpu_percent: of one core
    *_bytes:     (resident, unique to the process), of the server and of its children
    kv_bytes:    reserved for KV blocks
    """

    worker: str
    cpu_percent: float
    server_bytes: tuple[int, int]
    engine_bytes: tuple[int, int]
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker's server process, whose children are its engine."""

    worker: str
    pid: int
    kv_bytes: int


async def idle_footprints(watched: Sequence[Watched], seconds: float) -> list[Footprint]:
    """Footprint of each process over so many seconds without a request."""
    await asyncio.sleep(SETTLE_SECONDS)
    servers = [psutil.Process(one.pid) for one in watched]
    before = [_cpu_seconds(server) for server in servers]
    start = time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - start
    used = [
        100 * (_cpu_seconds(server) - b) / took for server, b in zip(servers, before, strict=True)
    ]
    return [
        Footprint(
            one.worker,
            cpu,
            _memory([server]),
            _memory(server.children(recursive=True)),
            one.kv_bytes,
        )
        for one, cpu, server in zip(watched, used, servers, strict=True)
    ]


def others_cpu_seconds() -> float:
    """Processor time of this machine that did not go to this process and its descendants, since it
    started.

    Stolen time is in it.  A difference of two readings shows whether a measurement had the machine
    to itself.
    """
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.softirq + times.irq + times.steal
    own = psutil.Process().cpu_times()
    return float(busy - _cpu_seconds(psutil.Process()) - own.children_user - own.children_system)


def _cpu_seconds(server: psutil.Process) -> float:
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _memory(processes: list[psutil.Process]) -> tuple[int, int]:
    infos = [process.memory_full_info() for process in processes]
    return sum(info.rss for info in infos), sum(info.uss for info in infos)
