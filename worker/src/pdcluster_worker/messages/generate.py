"""Items on the stream `generate`, which carries all requests of a pair; a frame is a list."""

import msgspec

from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec


class SubmitCall(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """spec: a RequestSpec, decoded apart: a wrong one ends its own call alone.  context: trace
    headers.
    """

    call: int
    engine_id: str  # that it is meant for; another one refuses
    prefill: str
    spec: msgspec.Raw
    context: dict[str, str] = {}


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=1):
    call: int


class CallFailure(msgspec.Struct, frozen=True, array_like=True):
    """status: of a RequestError, whose other fields follow; None = the worker's own failure."""

    message: str
    status: int | None = None
    code: str | None = None
    param: str | None = None
    retry_after_seconds: int | None = None


class CallOutput(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The next token of a call.  The seconds of its notes count from the arrival of the call."""

    call: int
    generated: Generated


class CallEnd(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """End of a call without a last token: a failure, or None for an answer that breaks off."""

    call: int
    failure: CallFailure | None = None


decode_spec = msgspec.msgpack.Decoder(RequestSpec).decode
decode_requests = msgspec.msgpack.Decoder(list[SubmitCall | CancelCall]).decode
decode_replies = msgspec.msgpack.Decoder(list[CallOutput | CallEnd]).decode
