"""Framing of the KV port, version 2: pure encode and decode, big-endian; no object is ever
unpickled.

    sender -> receiver   hello    magic, version, engine_id it is meant for        once
    receiver -> sender   reply    magic, version, accepted or why not              once
    sender -> receiver   header   magic, epoch, heads, payload bytes, block ids    per frame
    sender -> receiver   the bytes of the blocks                                   per frame
    receiver -> sender   ack      magic, epoch, accepted or why not                per frame

Frames are answered in their order.

A decoder takes the bytes read so far and returns the message, or how many more
bytes to read: a reader never takes bytes of what follows.  Every size is checked
against its limit before it is asked for.  Bad bytes raise WireError, nothing else.
"""

import struct
from dataclasses import dataclass

from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.requests import EPOCH_BYTES

VERSION = 2
MAX_ENGINE_ID_BYTES = 256
MAX_REASON_BYTES = 512
MAX_FRAME_BLOCKS = 256
"""Bounds a header to about 1 KB."""
MAX_HEADS = 0xFFFF
MAX_PAYLOAD_BYTES = 1 << 28
"""The largest block that can travel; an engine takes `frame_bytes` in one frame."""
FRAME_BYTES = 2 << 20
"""Blocks of one epoch travel together up to this size."""

_MAGIC = b"PDCKV\r\n\x00"
_FRAME = b"KVFR"
_ACK = b"KVAK"
_HELLO_HEAD = struct.Struct("!8sHH")
_REPLY_HEAD = struct.Struct("!8sHBH")
_FRAME_HEAD = struct.Struct(f"!4s{EPOCH_BYTES}sHHQI")
_ACK_HEAD = struct.Struct(f"!4s{EPOCH_BYTES}sBH")


class WireError(PeerError):
    """The peer sent bytes that are not this protocol, or broke off within a message: close this
    connection.
    """


@dataclass(frozen=True, slots=True)
class KvHello:
    """Opens a connection; engine_id: the engine that the sender means to reach."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers Hello; refusal: why not, None when accepted."""

    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """Comes before a frame's payload: these heads of each block, in the order of `block_ids` (the
    receiver's ids).
    """

    epoch: bytes
    heads: range
    block_ids: tuple[int, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Answers a frame; refusal: why not, None when its blocks are whole in their places."""

    epoch: bytes
    refusal: str | None = None


def frame_bytes(block_bytes: int) -> int:
    """The most that a frame carries: a block over FRAME_BYTES travels alone."""
    return max(FRAME_BYTES, block_bytes)


def encode_hello(hello: KvHello) -> bytes:
    """Raises WireError if the engine_id is too long."""
    engine_id = hello.engine_id.encode()
    _check("engine_id bytes", len(engine_id), MAX_ENGINE_ID_BYTES)
    return _HELLO_HEAD.pack(_MAGIC, VERSION, len(engine_id)) + engine_id


def decode_hello(data: bytes) -> KvHello | int:
    """The message, or the number of bytes still missing."""
    if (missing := _HELLO_HEAD.size - len(data)) > 0:
        return missing
    magic, version, length = _HELLO_HEAD.unpack_from(data)
    _check_opening(magic, version)
    _check("engine_id bytes", length, MAX_ENGINE_ID_BYTES)
    text = _text(data, _HELLO_HEAD.size, length)
    return text if isinstance(text, int) else KvHello(text)


def encode_reply(reply: Reply) -> bytes:
    """A long refusal is cut."""
    reason = _cut(reply.refusal)
    return _REPLY_HEAD.pack(_MAGIC, VERSION, reply.refusal is not None, len(reason)) + reason


def decode_reply(data: bytes) -> Reply | int:
    """The message, or the number of bytes still missing."""
    if (missing := _REPLY_HEAD.size - len(data)) > 0:
        return missing
    magic, version, status, length = _REPLY_HEAD.unpack_from(data)
    _check_opening(magic, version)
    _check("reason bytes", length, MAX_REASON_BYTES)
    text = _text(data, _REPLY_HEAD.size, length)
    return text if isinstance(text, int) else Reply(_refusal(status, text))


def encode_header(header: Header) -> bytes:
    """Raises WireError if the frame is over a limit or the epoch malformed."""
    _check("epoch bytes", len(header.epoch), EPOCH_BYTES)
    _check_frame(header.heads, len(header.block_ids), header.payload_bytes)
    ends = header.heads.start, header.heads.stop
    head = _FRAME_HEAD.pack(
        _FRAME, header.epoch, *ends, header.payload_bytes, len(header.block_ids)
    )
    return head + _block_ids(len(header.block_ids)).pack(*header.block_ids)


def decode_header(data: bytes) -> Header | int:
    """The message, or the number of bytes still missing.

    Ids are any 32-bit numbers: whether they and the heads may be written is not known here.
    """
    if (missing := _FRAME_HEAD.size - len(data)) > 0:
        return missing
    magic, epoch, first_head, end_head, payload_bytes, count = _FRAME_HEAD.unpack_from(data)
    if magic != _FRAME:
        raise WireError(f"not a frame header: {magic!r}")
    heads = range(first_head, end_head)
    _check_frame(heads, count, payload_bytes)
    ids = _block_ids(count)
    if (missing := _FRAME_HEAD.size + ids.size - len(data)) > 0:
        return missing
    return Header(epoch, heads, ids.unpack_from(data, _FRAME_HEAD.size), payload_bytes)


def encode_ack(ack: Ack) -> bytes:
    """A long refusal is cut.  Raises WireError if the epoch is malformed."""
    _check("epoch bytes", len(ack.epoch), EPOCH_BYTES)
    reason = _cut(ack.refusal)
    return _ACK_HEAD.pack(_ACK, ack.epoch, ack.refusal is not None, len(reason)) + reason


def decode_ack(data: bytes) -> Ack | int:
    """The message, or the number of bytes still missing."""
    if (missing := _ACK_HEAD.size - len(data)) > 0:
        return missing
    magic, epoch, status, length = _ACK_HEAD.unpack_from(data)
    if magic != _ACK:
        raise WireError(f"not an acknowledgement: {magic!r}")
    _check("reason bytes", length, MAX_REASON_BYTES)
    text = _text(data, _ACK_HEAD.size, length)
    return text if isinstance(text, int) else Ack(epoch, _refusal(status, text))


def _check(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise WireError(f"{what}: {value} is over the limit of {limit}")


def _check_frame(heads: range, num_blocks: int, payload_bytes: int) -> None:
    if num_blocks == 0 or payload_bytes == 0:
        raise WireError("a frame has no blocks")
    if not heads:
        raise WireError(f"a frame has no heads: {heads.start} to {heads.stop}")
    _check("heads", heads.stop, MAX_HEADS)
    _check("blocks of a frame", num_blocks, MAX_FRAME_BLOCKS)
    _check("payload bytes of a frame", payload_bytes, MAX_PAYLOAD_BYTES)


def _check_opening(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise WireError(f"not a KV port: the connection opens with {magic!r}")
    if version != VERSION:
        raise WireError(
            f"KV protocol version {version} is not {VERSION}: run the same release on both workers"
        )


def _block_ids(count: int) -> struct.Struct:
    return struct.Struct(f"!{count}I")


def _cut(reason: str | None) -> bytes:
    return (reason or "").encode(errors="replace")[:MAX_REASON_BYTES]


def _refusal(status: int, text: str) -> str | None:
    if status not in (0, 1):
        raise WireError(f"unknown status {status}")
    return text if status else None


def _text(data: bytes, start: int, length: int) -> str | int:
    if (missing := start + length - len(data)) > 0:
        return missing
    return bytes(data[start : start + length]).decode(errors="replace")
