"""Protocol of head and headless engine: hello, reply, then frames (4-byte length), over mTLS."""

import asyncio
import ssl

import msgspec

from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.errors import WorkerError

FRAME_BYTES = 64 << 20  # a request of a million tokens takes 5 MB

HELLO_BYTES = 64 << 10
HELLO_SECONDS = 5.0

SILENCE_SECONDS = 60.0  # the head is gone without a frame for that long: it pings every second


VERSION = 16  # of the hello and of all messages: head and engine may be of different releases
_LENGTH_BYTES = 4


class HeadConnectionError(WorkerError):
    """The other end is gone, or not what it should be."""


class HeadHello(msgspec.Struct, frozen=True):
    """node: its name; address: where peers reach its KV port."""

    version: int
    cluster: str
    revision: str
    role: str
    node: str
    address: str


class HeadReply(msgspec.Struct, frozen=True):
    """refused: the reason; else dtype: to compute in."""

    dtype: str = ""
    refused: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(HeadHello).decode
decode_answer = msgspec.msgpack.Decoder(HeadReply).decode


def server_context(tls: TLSConfig) -> ssl.SSLContext:
    """Requires a certificate of the cluster's CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TLSConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    return context


async def read_frame(reader: asyncio.StreamReader, most: int = FRAME_BYTES) -> bytes:
    """Raises HeadConnectionError at the end, and for a frame that is too large."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > most:
            raise HeadConnectionError(f"a frame of {length} bytes; at most {most} are taken")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as e:
        raise HeadConnectionError(f"the connection ended: {e}") from e


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
