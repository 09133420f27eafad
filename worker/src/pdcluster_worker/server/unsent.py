"""Whose answers are not taken yet: connections of our port of which the kernel holds bytes, unsent or not acknowledged.

When a pod ends its network goes with it, and these bytes too.  The kernel's own
tables are read, for they know those connections as well that this process has
closed.  Where there are none (macOS) nothing counts.

A client of which nothing moves for STALLED_SECONDS, gone or stopped, counts no
more, so that none holds a drain for ever; nothing is done to its connection.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
"""Of the network namespace that this process lives in."""

STALLED_SECONDS = 300.0
"""A client that lives may well take nothing for a minute; the kernel itself gives up one that is gone after about 15 minutes."""

_FIN_BYTES = {"01": 0, "08": 0, "04": 1, "09": 1, "0B": 1}
"""In which states something may wait, and how much of it is the end of the stream, for which no client waits.

ESTABLISHED and CLOSE_WAIT; FIN_WAIT1, LAST_ACK and CLOSING.  A listener's queue is one of connections; elsewhere all is acknowledged.
"""

_STATE, _TRANSMIT_QUEUE = 3, 4


@dataclass(slots=True)
class _Held:
    """What the kernel holds for one connection; since when, by the clock, that is the same."""

    num_bytes: int
    since_seconds: float
    is_stalled: bool = False


class Unsent:
    """Follows the connections of one port.  clock: monotonic seconds."""

    def __init__(self, port: int, tables: Iterable[Path] = TABLES, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._tables = tuple(tables)
        self._clock = clock
        self._held: dict[str, _Held] = {}

    async def count(self) -> int:
        """Connections whose client has yet to take something, without the stalled ones."""
        found = await asyncio.to_thread(read, self._tables, self._port)  # tables may be long
        self._held = {connection: self._follow(connection, num_bytes) for connection, num_bytes in found.items()}
        return sum(not held.is_stalled for held in self._held.values())

    def _follow(self, connection: str, num_bytes: int) -> _Held:
        held, now = self._held.get(connection), self._clock()
        if held is None or held.num_bytes != num_bytes:
            return _Held(num_bytes, now)
        if not held.is_stalled and now - held.since_seconds >= STALLED_SECONDS:
            held.is_stalled = True
            logger.warning("client takes nothing of its answer, waited for no more unsent_bytes=%d seconds=%d", num_bytes, STALLED_SECONDS)
        return held


def read(tables: Iterable[Path], port: int) -> dict[str, int]:
    """Bytes that the kernel holds for each connection of the port, those with none left out."""
    found: dict[str, int] = {}
    for table in tables:
        with suppress(OSError), table.open(encoding="ascii", errors="replace") as lines:
            found.update(parse(lines, port))
    return found


def parse(lines: Iterable[str], port: int) -> Iterator[tuple[str, int]]:
    """The same for the lines of one table, as proc_pid_net(5) has them: number, local and remote address, state, tx_queue:rx_queue, ..."""
    for line in lines:
        fields = line.split()
        if len(fields) <= _TRANSMIT_QUEUE or (fin_bytes := _FIN_BYTES.get(fields[_STATE])) is None:
            continue
        _, local, remote, _, queues = fields[: _TRANSMIT_QUEUE + 1]
        with suppress(ValueError):
            num_bytes = int(queues.partition(":")[0], 16) - fin_bytes
            if int(local.rpartition(":")[2], 16) == port and num_bytes > 0:
                yield f"{local} {remote}", num_bytes
