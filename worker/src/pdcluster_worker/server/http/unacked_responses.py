"""Finds answers that clients have yet to take, in the kernel's tables, which list connections that
this process has closed too: they are lost with the pod's network.  A client of which nothing moves
for STALLED_SECONDS counts no more, so that none holds a drain without end.
"""

import asyncio
import ipaddress
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
"""Tables of the network namespace that this process lives in."""

STALLED_SECONDS = 45.0
"""Less than the default wait after a SIGTERM: `pdctl up` waits 60 s and a pod 300 s."""

REMEMBER_SECONDS = 10.0
"""Looks that lie further apart cannot tell what has moved between them; a drain looks
more often.
"""

_FIN_BYTES = {"01": 0, "08": 0, "04": 1, "09": 1, "0B": 1}
"""States in which something may wait, and how much of it is the end of the stream, for which no
client waits.

ESTABLISHED and CLOSE_WAIT; FIN_WAIT1, LAST_ACK and CLOSING.  A listener's queue is one of
connections; elsewhere all is acknowledged.
"""


class UnackedResponses:
    """Follows the connections that were accepted at one address, by their names (see `name`).
    clock: monotonic seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tables: Iterable[Path] = TABLES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local_end(host, port)
        self._tables = tuple(tables)
        self._clock = clock
        self._held: dict[str, tuple[int, float]] = {}  # (bytes, since when they are as many)
        self._stalled: set[str] = set()
        self._polled_seconds = clock()

    async def connections(self) -> frozenset[str]:
        """Those whose client has yet to take something, without the stalled ones.

        Raises OSError when the tables cannot be read now.
        """
        found = await asyncio.to_thread(read, self._tables, self._local)  # tables may be long
        now = self._clock()
        before = self._held if now - self._polled_seconds <= REMEMBER_SECONDS else {}
        self._polled_seconds = now
        self._held = {
            each: before[each] if before.get(each, (0,))[0] == num_bytes else (num_bytes, now)
            for each, num_bytes in found.items()
        }
        stalled = {
            each for each, (_, since) in self._held.items() if now - since >= STALLED_SECONDS
        }
        for each in stalled - self._stalled:
            logger.warning(
                "client reads nothing, no longer waiting for it unsent_bytes=%d seconds=%d",
                *(found[each], STALLED_SECONDS),
            )
        self._stalled = stalled
        return frozenset(found) - stalled


def name(local: tuple[str, int], remote: tuple[str, int]) -> str:
    return f"{_end(*local)} {_end(*remote)}"


def _end(host: str, port: int) -> str:
    packed = ipaddress.ip_address(host).packed  # a zone is no part of it
    # each is printed as a number of this machine
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def local_end(host: str, port: int) -> str:
    """End of the local address of each connection accepted there: the port alone where the host is
    any address.
    """
    end = _end(host, port)
    return end[end.index(":") :] if ipaddress.ip_address(host).is_unspecified else end


def read(tables: Iterable[Path], local: str) -> dict[str, int]:
    """{name: bytes} that the kernel holds for each connection with that `local_end`, those with
    none left out.

    A table that is not there or not for us says nothing.  Raises OSError for any other reason not
    to read one.
    """
    found: dict[str, int] = {}
    for table in tables:
        with (
            suppress(FileNotFoundError, PermissionError),
            table.open(encoding="ascii", errors="replace") as lines,
        ):
            found.update(parse(lines, local))
    return found


def parse(lines: Iterable[str], local: str) -> Iterator[tuple[str, int]]:
    """The same for the lines of one table, as proc_pid_net(5) has them: number, local and remote
    address, state, tx_queue:rx_queue, ...
    """
    for line in lines:
        fields = line.split()
        if len(fields) < 5 or not fields[1].endswith(local) or fields[3] not in _FIN_BYTES:
            continue
        with suppress(ValueError):
            num_bytes = int(fields[4].partition(":")[0], 16) - _FIN_BYTES[fields[3]]
            if num_bytes > 0:
                yield f"{fields[1]} {fields[2]}", num_bytes
