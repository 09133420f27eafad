"""Framing of the KV port, version 3: pure, big-endian; no object is ever unpickled."""

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.requests import EPOCH_BYTES

VERSION = 3
MAX_ENGINE_ID_BYTES = 256
MAX_REASON_BYTES = 512
MAX_CARRIERS_BYTES = 64
MAX_BLOB_BYTES = 256 << 10
"""A carrier's own part: addresses of devices, and keys of a few runs of memory."""
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
_OPENING = struct.Struct("!8sH")
_KIND = struct.Struct("!4s")
_HELLO_HEAD = struct.Struct("!HH")
_REPLY_HEAD = struct.Struct("!BH")
_ATTACH_HEAD = struct.Struct(f"!{EPOCH_BYTES}sI")
_ATTACHED_HEAD = struct.Struct("!BI")
_PROBE_BODY = struct.Struct(f"!Q{PROBE_BYTES}s")
_FRAME_HEAD = struct.Struct(f"!{EPOCH_BYTES}sHHQIBQ")
_ACK_HEAD = struct.Struct(f"!{EPOCH_BYTES}sBH")


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
    place: int | None = None  # number by which the carrier knows the payload; None = it follows


@dataclass(frozen=True, slots=True)
class Ack:
    """Answers a frame; refusal: why not, None when its blocks are whole in their places."""

    epoch: bytes
    refusal: str | None = None


def frame_bytes(block_bytes: int) -> int:
    """The most that a frame carries: a block over FRAME_BYTES travels alone."""
    return max(FRAME_BYTES, block_bytes)


# --- encoders: raise WireError for what is over a limit; a long refusal is cut ---


def encode_hello(hello: KvHello) -> bytes:
    engine_id, carriers = hello.engine_id.encode(), ",".join(hello.carriers).encode()
    _check("engine_id bytes", len(engine_id), MAX_ENGINE_ID_BYTES)
    lengths = _HELLO_HEAD.pack(len(engine_id), len(carriers))
    return _OPENING.pack(_MAGIC, VERSION) + lengths + engine_id + carriers


def encode_reply(reply: Reply) -> bytes:
    reason = _cut(reply.refusal or reply.carrier)
    head = _REPLY_HEAD.pack(reply.refusal is not None, len(reason))
    return _OPENING.pack(_MAGIC, VERSION) + head + reason


def encode_attach(attach: Attach) -> bytes:
    _check("epoch bytes", len(attach.epoch), EPOCH_BYTES)
    _check("bytes of a carrier", len(attach.blob), MAX_BLOB_BYTES)
    return _ATTACH + _ATTACH_HEAD.pack(attach.epoch, len(attach.blob)) + attach.blob


def encode_attached(attached: Attached) -> bytes:
    _check("bytes of a carrier", len(attached.blob), MAX_BLOB_BYTES)
    is_refused = attached.refusal is not None
    rest = _cut(attached.refusal) if is_refused else attached.blob
    return _ATTACHED + _ATTACHED_HEAD.pack(is_refused, len(rest)) + rest


def encode_probe(probe: CarrierProbe) -> bytes:
    if len(probe.data) != PROBE_BYTES:
        raise WireError(f"a probe has {len(probe.data)} bytes, not {PROBE_BYTES}")
    return _PROBE + _PROBE_BODY.pack(probe.place, probe.data)


def encode_header(header: Header) -> bytes:
    _check("epoch bytes", len(header.epoch), EPOCH_BYTES)
    _check_frame(header.heads, len(header.block_ids), header.payload_bytes)
    head = _FRAME_HEAD.pack(
        *(header.epoch, header.heads.start, header.heads.stop, header.payload_bytes),
        *(len(header.block_ids), header.place is not None, header.place or 0),
    )
    return _FRAME + head + _block_ids(len(header.block_ids)).pack(*header.block_ids)


def encode_ack(ack: Ack) -> bytes:
    _check("epoch bytes", len(ack.epoch), EPOCH_BYTES)
    reason = _cut(ack.refusal)
    return _ACK + _ACK_HEAD.pack(ack.epoch, ack.refusal is not None, len(reason)) + reason


# --- decoders: the message, or how many more bytes to read ---


class _IncompleteError(Exception):
    """So many bytes of the message are missing."""


class _Parts:
    """Takes the parts of a message off its bytes, in order.  Raises _IncompleteError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def take(self, num_bytes: int) -> bytes:
        start, self._place = self._place, self._place + num_bytes
        if (missing := self._place - len(self._data)) > 0:
            raise _IncompleteError(missing)
        return bytes(self._data[start : self._place])

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def text(self, num_bytes: int) -> str:
        return self.take(num_bytes).decode(errors="replace")

    def opening(self) -> None:
        """The version is checked before any length."""
        magic, version = self.unpack(_OPENING)
        if magic != _MAGIC:
            raise WireError(f"not a KV port: the connection opens with {magic!r}")
        if version != VERSION:
            raise WireError(
                f"KV protocol version {version} is not {VERSION}: run the same release on both "
                "workers"
            )


_MessageT = TypeVar("_MessageT")


def _decoder(decode: Callable[[_Parts], _MessageT]) -> Callable[[bytes], _MessageT | int]:
    @wraps(decode)
    def of_bytes(data: bytes) -> _MessageT | int:
        try:
            return decode(_Parts(data))
        except _IncompleteError as e:
            return int(e.args[0])

    return of_bytes


@_decoder
def decode_hello(parts: _Parts) -> KvHello:
    parts.opening()
    length, more = parts.unpack(_HELLO_HEAD)
    _check("engine_id bytes", length, MAX_ENGINE_ID_BYTES)
    _check("carriers bytes", more, MAX_CARRIERS_BYTES)
    engine_id, carriers = parts.text(length), parts.text(more)
    return KvHello(engine_id, tuple(filter(None, carriers.split(","))))


@_decoder
def decode_reply(parts: _Parts) -> Reply:
    parts.opening()
    status, length = parts.unpack(_REPLY_HEAD)
    _check("reason bytes", length, MAX_REASON_BYTES)
    text = parts.text(length)
    return Reply(refusal=text) if _is_refused(status) else Reply(carrier=text)


@_decoder
def decode_attached(parts: _Parts) -> Attached:
    (kind,) = parts.unpack(_KIND)
    if kind != _ATTACHED:
        raise WireError(f"not an answer to attach: {kind!r}")
    status, length = parts.unpack(_ATTACHED_HEAD)
    _check("bytes of a carrier", length, MAX_BLOB_BYTES)
    rest = parts.take(length)
    if _is_refused(status):
        return Attached(refusal=rest.decode(errors="replace"))
    return Attached(rest)


@_decoder
def decode_request(parts: _Parts) -> KvRequest:
    (kind,) = parts.unpack(_KIND)
    if kind == _FRAME:
        return _header(parts)
    if kind == _PROBE:
        return CarrierProbe(*parts.unpack(_PROBE_BODY))
    if kind != _ATTACH:
        raise WireError(f"not a frame header: {kind!r}")
    epoch, length = parts.unpack(_ATTACH_HEAD)
    _check("bytes of a carrier", length, MAX_BLOB_BYTES)
    return Attach(epoch, parts.take(length))


@_decoder
def decode_ack(parts: _Parts) -> Ack:
    (kind,) = parts.unpack(_KIND)
    if kind != _ACK:
        raise WireError(f"not an acknowledgement: {kind!r}")
    epoch, status, length = parts.unpack(_ACK_HEAD)
    _check("reason bytes", length, MAX_REASON_BYTES)
    text = parts.text(length)
    return Ack(epoch, text if _is_refused(status) else None)


def _header(parts: _Parts) -> Header:
    """Ids and heads are not checked here."""
    epoch, first, end, payload_bytes, count, is_placed, place = parts.unpack(_FRAME_HEAD)
    if is_placed not in (0, 1) or (place and not is_placed):
        raise WireError(f"unknown place {is_placed} {place}")
    heads = range(first, end)
    _check_frame(heads, count, payload_bytes)
    block_ids = parts.unpack(_block_ids(count))
    return Header(epoch, heads, block_ids, payload_bytes, place if is_placed else None)


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


def _block_ids(count: int) -> struct.Struct:
    return struct.Struct(f"!{count}I")


def _cut(reason: str | None) -> bytes:
    return (reason or "").encode(errors="replace")[:MAX_REASON_BYTES]


def _is_refused(status: int) -> bool:
    if status not in (0, 1):
        raise WireError(f"unknown status {status}")
    return bool(status)
