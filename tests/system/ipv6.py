"""IPv6 on this machine: a kernel, or a container, may have none."""

import socket
from contextlib import suppress


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False
