"""Protocol of the line: a hello, an answer, then frames of engine messages; all within mutual TLS
of the cluster.

A frame is its length in 4 bytes and so many bytes, FRAME_BYTES at most.  Both ends
show the cluster's certificate: a process without one gets no further than TLS.
"""

import asyncio
import ssl

import msgspec

from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.errors import WorkerError

FRAME_BYTES = 64 << 20
"""Longest frame, above any list of messages: a request of a million tokens takes 5 MB."""

HELLO_BYTES = 64 << 10
HELLO_SECONDS = 5.0

SILENCE_SECONDS = 60.0
"""Without a frame of the head for that long it is gone: it pings every second."""

SERVER_NAME = "worker.pdcluster"
"""Name in the certificate of every worker of a cluster."""

VERSION = 5
"""Version of the hello and of all messages: a head and its engines may be of two releases."""
_LENGTH_BYTES = 4


class HeadConnectionError(WorkerError):
    """The other end is gone, or is not what it should be."""


class HeadHello(msgspec.Struct, frozen=True):
    """First message of a headless engine.  node: its name; address: where peers reach
    its KV port.
    """

    version: int
    cluster: str
    revision: str
    role: str
    node: str
    address: str


class HeadReply(msgspec.Struct, frozen=True):
    """Reply of the head.  refused: reason why it may not serve; else dtype: the one
    to compute in.
    """

    dtype: str = ""
    refused: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(HeadHello).decode
decode_answer = msgspec.msgpack.Decoder(HeadReply).decode


def server_context(tls: TLSConfig) -> ssl.SSLContext:
    """Context of the head: it asks for a certificate of the cluster's authorities."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TLSConfig) -> ssl.SSLContext:
    """Context of a headless engine."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    return context


async def read_frame(reader: asyncio.StreamReader, most: int = FRAME_BYTES) -> bytes:
    """Wait for one frame.

    Raises HeadConnectionError at the end of the line, and for a frame that is too large.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > most:
            raise HeadConnectionError(f"a frame of {length} bytes; at most {most} are taken")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as e:
        raise HeadConnectionError(f"the connection ended: {e}") from e


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Queue one frame."""
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
