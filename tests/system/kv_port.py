"""The KV port as a stranger sees it: plain sockets and the bytes of `kv_transfer.wire`."""

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.messages.requests import TransferTarget

MessageT = TypeVar("MessageT")

SOCKET_SECONDS = 20.0
HEADS = range(2)
"""KV heads of the model that these workers serve (`tests/make_tiny_model`)."""


def connect(address: str) -> socket.socket:
    """A plain TCP connection to host:port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SOCKET_SECONDS)


def receive(sock: socket.socket, decode: Callable[[bytes], MessageT | int]) -> MessageT:
    data = b""
    while isinstance(message := decode(data), int):
        chunk = sock.recv(message)
        assert chunk, f"the worker closed the connection after {data!r}"
        data += chunk
    return message


def write_blocks(
    target: TransferTarget, block_ids: Sequence[int], block_bytes: int
) -> list[str | None]:
    """Write zeros to these blocks under the target's epoch, a frame each, as a sender would;
    returns why each was refused, None if not.
    """
    with connect(target.addresses[0]) as sock:
        sock.sendall(wire.encode_hello(wire.KvHello(target.engine_id)))
        assert receive(sock, wire.decode_reply) == wire.Reply(None)
        refusals = []
        for block_id in block_ids:
            sock.sendall(
                wire.encode_header(wire.Header(target.epoch, HEADS, (block_id,), block_bytes))
                + bytes(block_bytes)
            )
            refusals.append(receive(sock, wire.decode_ack).refusal)
        return refusals
