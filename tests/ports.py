"""Loopback ports for servers that must know theirs before they start, or that come back to it.

From 32768 on the kernel gives ports to whatever asks for any, so one that was
free there may be taken a moment later.  These lie below, and each process of
`pytest -n` has some of its own.
"""

import itertools
import os
import random
import socket

_FIRST, _SLICE, _NUM_SLICES = 12_000, 1_500, 12

_slice = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_SLICES
# Begins anywhere in it: two runs of pytest at a time on one machine are then unlikely to meet.
_offsets = itertools.count(random.SystemRandom().randrange(_SLICE))


def free_port() -> int:
    """A port that nothing listens on, and that no other test is given before all others were."""
    for offset in itertools.islice(_offsets, _SLICE):
        port = _FIRST + _slice * _SLICE + offset % _SLICE
        if _is_free(port):
            return port
    raise AssertionError(f"{_SLICE} ports from {_FIRST + _slice * _SLICE} on are all taken")


def free_ports(number: int) -> int:
    """The first of so many ports in a row, each as `free_port` gives it."""
    ports = [free_port() for _ in range(number)]
    while ports[-1] - ports[0] != number - 1:
        ports = [*ports[1:], free_port()]
    return ports[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # remains of closed connections are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
