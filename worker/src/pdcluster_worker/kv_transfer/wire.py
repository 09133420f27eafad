"""Framing of the KV port, version 3: pure encode and decode, big-endian; no object is ever
unpickled.
"""

#   sender -> receiver   hello     magic, version, engine_id it is meant for, carriers it has
#   receiver -> sender   reply     magic, version, the carrier that both have, or why refused
#   sender -> receiver   attach    magic, epoch, what the carrier needs to know of the sender
#   receiver -> sender   attached  magic, what the carrier needs to know of the receiver, or why not
#   sender -> receiver   probe     magic, place, bytes that the carrier has there
#   receiver -> sender   ack       once the carrier has brought these, or why not
#   sender -> receiver   header    magic, epoch, heads, payload bytes, block ids    per frame
#   sender -> receiver   the bytes of the blocks, unless the carrier brings them    per frame
#   receiver -> sender   ack       magic, epoch, accepted or why not                per frame
#
# Hello and reply come once; attach and probe where a carrier was agreed on, before its first frame.
# Frames are answered in their order.
#
# A decoder takes the bytes read so far and returns the message, or how many more
# bytes to read: a reader never takes bytes of what follows.  Every size is checked
# against its limit before it is asked for.  Bad bytes raise WireError, nothing else.

import struct
from dataclasses import dataclass

from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.requests import EPOCH_BYTES

VERSION = 3
MAX_ENGINE_ID_BYTES = 256
MAX_REASON_BYTES = 512
MAX_CARRIERS_BYTES = 64
MAX_BLOB_BYTES = 256 << 10
"""A carrier's own part of a message: addresses of devices, and keys of a few runs of memory."""
PROBE_BYTES = 64
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
_ATTACH = b"KVAT"
_ATTACHED = b"KVAD"
_PROBE = b"KVPR"
_MAGIC_BYTES = 4
_OPENING = struct.Struct("!8sH")
_HELLO_HEAD = struct.Struct("!8sHHH")
_REPLY_HEAD = struct.Struct("!8sHBH")
_ATTACH_HEAD = struct.Struct(f"!4s{EPOCH_BYTES}sI")
_ATTACHED_HEAD = struct.Struct("!4sBI")
_PROBE_BODY = struct.Struct(f"!4sQ{PROBE_BYTES}s")
_FRAME_HEAD = struct.Struct(f"!4s{EPOCH_BYTES}sHHQIBQ")
_ACK_HEAD = struct.Struct(f"!4s{EPOCH_BYTES}sBH")


class WireError(PeerError):
    """Bytes that are not this protocol, or broke off: close this connection."""


@dataclass(frozen=True, slots=True)
class KvHello:
    """Opens a connection; engine_id: the engine that the sender means to reach."""

    engine_id: str
    carriers: tuple[str, ...] = ()  # kinds that it has and may use, the best first


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers Hello; refusal: why not, None when accepted."""

    refusal: str | None = None
    carrier: str = ""  # that brings payloads from now on; empty = they follow their headers


class KvRequest:
    """A message of the sender after its hello."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Attach(KvRequest):
    """Begins the use of a carrier."""

    epoch: bytes  # one that is open, which shows that we were asked to write
    blob: bytes  # the carrier's own


@dataclass(frozen=True, slots=True)
class Attached:
    """Answers Attach; refusal: why not, None when accepted."""

    blob: bytes = b""
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class CarrierProbe(KvRequest):
    """Has the receiver try the carrier: at this place there are these bytes."""

    place: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Header(KvRequest):
    """Before a frame's payload: these heads of each block, by the receiver's block ids."""

    epoch: bytes
    heads: range
    block_ids: tuple[int, ...]
    payload_bytes: int
    # Number by which the carrier knows the payload; None = it follows here.
    place: int | None = None


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
    engine_id, carriers = hello.engine_id.encode(), ",".join(hello.carriers).encode()
    _check("engine_id bytes", len(engine_id), MAX_ENGINE_ID_BYTES)
    head = _HELLO_HEAD.pack(_MAGIC, VERSION, len(engine_id), len(carriers))
    return head + engine_id + carriers


def decode_hello(data: bytes) -> KvHello | int:
    """The message, or how many bytes are missing; the version is checked before the length."""
    if (missing := _OPENING.size - len(data)) > 0:
        return missing
    _check_opening(*_OPENING.unpack_from(data))
    if (missing := _HELLO_HEAD.size - len(data)) > 0:
        return missing
    _, _, length, more = _HELLO_HEAD.unpack_from(data)
    _check("engine_id bytes", length, MAX_ENGINE_ID_BYTES)
    _check("carriers bytes", more, MAX_CARRIERS_BYTES)
    carriers = _text(data, _HELLO_HEAD.size + length, more)
    if isinstance(carriers, int):
        return carriers
    engine_id = bytes(data[_HELLO_HEAD.size :][:length]).decode(errors="replace")
    return KvHello(engine_id, tuple(filter(None, carriers.split(","))))


def encode_reply(reply: Reply) -> bytes:
    reason = _cut(reply.refusal or reply.carrier)
    return _REPLY_HEAD.pack(_MAGIC, VERSION, reply.refusal is not None, len(reason)) + reason


def decode_reply(data: bytes) -> Reply | int:
    """The message, or the number of bytes still missing."""
    if (missing := _REPLY_HEAD.size - len(data)) > 0:
        return missing
    magic, version, status, length = _REPLY_HEAD.unpack_from(data)
    _check_opening(magic, version)
    _check("reason bytes", length, MAX_REASON_BYTES)
    text = _text(data, _REPLY_HEAD.size, length)
    if isinstance(text, int):
        return text
    refusal = _refusal(status, text)
    return Reply(refusal, carrier=text if refusal is None else "")


def encode_attach(attach: Attach) -> bytes:
    """Raises WireError if something of it is too long, or the epoch malformed."""
    _check("epoch bytes", len(attach.epoch), EPOCH_BYTES)
    _check("bytes of a carrier", len(attach.blob), MAX_BLOB_BYTES)
    return _ATTACH_HEAD.pack(_ATTACH, attach.epoch, len(attach.blob)) + attach.blob


def _decode_attach(data: bytes) -> Attach | int:
    if (missing := _ATTACH_HEAD.size - len(data)) > 0:
        return missing
    _, epoch, length = _ATTACH_HEAD.unpack_from(data)
    _check("bytes of a carrier", length, MAX_BLOB_BYTES)
    blob = _bytes(data, _ATTACH_HEAD.size, length)
    return blob if isinstance(blob, int) else Attach(epoch, blob)


def encode_attached(attached: Attached) -> bytes:
    """A long refusal is cut.  Raises WireError if the blob is too long."""
    _check("bytes of a carrier", len(attached.blob), MAX_BLOB_BYTES)
    is_refused = attached.refusal is not None
    rest = _cut(attached.refusal) if is_refused else attached.blob
    return _ATTACHED_HEAD.pack(_ATTACHED, is_refused, len(rest)) + rest


def decode_attached(data: bytes) -> Attached | int:
    """The message, or the number of bytes still missing."""
    if (missing := _ATTACHED_HEAD.size - len(data)) > 0:
        return missing
    magic, status, length = _ATTACHED_HEAD.unpack_from(data)
    if magic != _ATTACHED:
        raise WireError(f"not an answer to attach: {magic!r}")
    _check("bytes of a carrier", length, MAX_BLOB_BYTES)
    blob = _bytes(data, _ATTACHED_HEAD.size, length)
    if isinstance(blob, int):
        return blob
    refusal = _refusal(status, blob.decode(errors="replace"))
    return Attached(blob if refusal is None else b"", refusal)


def encode_probe(probe: CarrierProbe) -> bytes:
    """Raises WireError unless it has PROBE_BYTES."""
    if len(probe.data) != PROBE_BYTES:
        raise WireError(f"a probe has {len(probe.data)} bytes, not {PROBE_BYTES}")
    return _PROBE_BODY.pack(_PROBE, probe.place, probe.data)


def _decode_probe(data: bytes) -> CarrierProbe | int:
    if (missing := _PROBE_BODY.size - len(data)) > 0:
        return missing
    _, place, there = _PROBE_BODY.unpack_from(data)
    return CarrierProbe(place, there)


def decode_request(data: bytes) -> KvRequest | int:
    """The message after the hello, or the number of bytes still missing."""
    if (missing := _MAGIC_BYTES - len(data)) > 0:
        return missing
    if data.startswith(_ATTACH):
        return _decode_attach(data)
    return _decode_probe(data) if data.startswith(_PROBE) else decode_header(data)


def encode_header(header: Header) -> bytes:
    """Raises WireError if the frame is over a limit or the epoch malformed."""
    _check("epoch bytes", len(header.epoch), EPOCH_BYTES)
    _check_frame(header.heads, len(header.block_ids), header.payload_bytes)
    ends = header.heads.start, header.heads.stop
    place = header.place is not None, header.place or 0
    head = _FRAME_HEAD.pack(
        _FRAME, header.epoch, *ends, header.payload_bytes, len(header.block_ids), *place
    )
    return head + _block_ids(len(header.block_ids)).pack(*header.block_ids)


def decode_header(data: bytes) -> Header | int:
    """The message, or how many bytes are missing; ids and heads are not checked here."""
    if (missing := _FRAME_HEAD.size - len(data)) > 0:
        return missing
    magic, epoch, first_head, end_head, payload_bytes, count, is_placed, place = (
        _FRAME_HEAD.unpack_from(data)
    )
    if magic != _FRAME:
        raise WireError(f"not a frame header: {magic!r}")
    if is_placed not in (0, 1) or (place and not is_placed):
        raise WireError(f"unknown place {is_placed} {place}")
    heads = range(first_head, end_head)
    _check_frame(heads, count, payload_bytes)
    ids = _block_ids(count)
    if (missing := _FRAME_HEAD.size + ids.size - len(data)) > 0:
        return missing
    block_ids = ids.unpack_from(data, _FRAME_HEAD.size)
    return Header(epoch, heads, block_ids, payload_bytes, place if is_placed else None)


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
    found = _bytes(data, start, length)
    return found if isinstance(found, int) else found.decode(errors="replace")


def _bytes(data: bytes, start: int, length: int) -> bytes | int:
    if (missing := start + length - len(data)) > 0:
        return missing
    return bytes(data[start : start + length])
