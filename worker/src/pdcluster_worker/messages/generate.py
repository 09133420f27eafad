"""Items on the stream `generate`, which carries all requests of a pair: a frame is a list of them.

A request has a number of the calling worker.  A frame holds what is sent at one moment: the tokens
of a step, or a whole answer.
"""

import msgspec

from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec


class SubmitCall(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Run a request.

    engine_id: the engine it is meant for; another one refuses.
    spec:      a RequestSpec, decoded by itself: a wrong one ends its own call alone.
    context:   headers of its trace.
    """

    call: int
    engine_id: str
    prefill: str
    spec: msgspec.Raw
    context: dict[str, str] = {}


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Cancel a call; of one that has ended a no-op."""

    call: int


class CallFailure(msgspec.Struct, frozen=True, array_like=True):
    """Error that ended a call.

    status: of a RequestError, whose other fields follow; None = the worker's own failure, in words.
    """

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
    """The end of a call whose last token did not say so: a failure, or None for an answer that
    breaks off.
    """

    call: int
    failure: CallFailure | None = None


decode_spec = msgspec.msgpack.Decoder(RequestSpec).decode
decode_requests = msgspec.msgpack.Decoder(list[SubmitCall | CancelCall]).decode
decode_replies = msgspec.msgpack.Decoder(list[CallOutput | CallEnd]).decode
