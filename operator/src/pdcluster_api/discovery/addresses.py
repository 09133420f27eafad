"""Addresses that users wrote, before the operator dials them. The operator stands where its users
do not: on its own loopback, and beside services that clouds have on link-local addresses. So the
connection goes to the addresses that were judged, whatever the name leads to a moment later.
"""

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_schema.ports import parse_address

RESOLVE_SECONDS = 3.0

METADATA = tuple(map(ip_network, ("100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32")))
"""Services of clouds for their machines, where they are not link-local."""

_NAT64 = ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class ResolvedEndpoint:
    """text: host:port, as the user wrote it; target: of gRPC, of the judged addresses alone"""

    text: str
    target: str

    def __str__(self) -> str:
        return self.text

    @property
    def host(self) -> str:
        """Its name, which a certificate has to have."""
        return parse_address(self.text)[0]


def is_refused(address: str, *, may_be_loopback: bool = False) -> bool:
    """Return whether no etcd of a user is there: loopback, link-local, multicast or a cloud's own.

    >>> [is_refused(each) for each in ("10.0.0.1", "127.0.0.1", "169.254.169.254", "fe80::1%1")]
    [False, True, True, True]
    """
    found = _unwrapped(ip_address(address))
    if found.is_loopback:
        return not may_be_loopback
    is_special = found.is_link_local or found.is_multicast or found.is_unspecified
    return is_special or any(found in network for network in METADATA)


def _unwrapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


async def resolve(endpoint: str, *, may_be_loopback: bool = False) -> ResolvedEndpoint | None:
    """Find where an endpoint leads; None = nowhere.

    Raises EtcdUnreachableError where that is an address which no etcd of a user has.
    """
    host, port = parse_address(endpoint)
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError):  # TimeoutError is one
        return None
    addresses = [str(place[0]) for _, _, _, _, place in found]
    if any(is_refused(each, may_be_loopback=may_be_loopback) for each in addresses):
        raise EtcdUnreachableError(
            f"{endpoint} is not asked: it leads to a loopback, link-local or metadata address; "
            "give the address of an etcd that workers on every node reach"
        )
    family = found[0][0]
    of_family = [str(place[0]) for each, _, _, _, place in found if each == family]
    if family == socket.AF_INET6:
        return ResolvedEndpoint(endpoint, f"ipv6:{','.join(f'[{a}]:{port}' for a in of_family)}")
    return ResolvedEndpoint(endpoint, f"ipv4:{','.join(f'{a}:{port}' for a in of_family)}")
