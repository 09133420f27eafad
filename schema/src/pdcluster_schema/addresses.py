"""Addresses as host:port, for IPv4, IPv6 in brackets, and names."""

MAX_PORT = 65535


def parse_address(address: str) -> tuple[str, int]:
    """Split "10.0.0.1:9100", "[fd00::1]:9100" or "worker-0.pods:9100".

    Raises ValueError that names the address; an IPv6 host without brackets is refused because its
    port is ambiguous.
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host) != is_bracketed:
        raise ValueError(f"address {address!r} is not host:port (an IPv6 host goes in brackets)")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ValueError(f"address {address!r}: port must be in 1..{MAX_PORT}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
