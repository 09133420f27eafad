"""Options that both ends of a KV connection set on their sockets, and names of socket errors."""

import os
import socket
import struct

BUFFER_BYTES = 4 << 20
"""Asked of the kernel, which may give less (net.core.wmem_max, rmem_max)."""

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


def tune(sock: socket.socket) -> None:
    """No Nagle delay, large buffers; a vanished machine is noticed in about a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # names differ outside Linux, where the kernel's defaults serve
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def limit_send_wait(sock: socket.socket, seconds: int) -> None:
    """Make a blocking send fail after `seconds` without room; reads still have no time limit."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, 0))


def describe(error: Exception) -> str:
    """An error in words for a log: the system's message in lower case, or the exception's own."""
    if isinstance(error, socket.gaierror):  # its errno is not the system's
        return str(error.strerror).lower()
    if isinstance(error, OSError) and error.errno:
        # not error.strerror: the standard library adds to it
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
