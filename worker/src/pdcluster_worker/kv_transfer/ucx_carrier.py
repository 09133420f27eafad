"""Carrier over UCX itself, by ucxx: tagged messages, each into a slot that the receiver gave."""

import importlib
import os
import secrets
from typing import Any

import msgspec

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.kv_transfer.carrier import (
    RECEIVING_SLOTS,
    SENDING_SLOTS,
    CarrierError,
    Fetch,
    HostSlots,
    Slot,
    SlotPool,
    slots_of,
)

PROGRESS_MILLISECONDS = 1000
"""Longest wait for an event, after which the thread looks by itself."""

_CLOSE_NANOSECONDS = 500_000_000
_PLACE_BITS = 32

_Blob = tuple[bytes, int]
_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[_Blob] = msgspec.msgpack.Decoder(_Blob)


class UcxCarrier:
    """`carrier.Carrier`.  Raises CarrierError if UCX does not start, ImportError without ucxx."""

    kind = "ucx"

    def __init__(self, slot_bytes: int, memory: KVMemory) -> None:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        self._slot_bytes = slot_bytes
        self._memory = memory
        self.api: Any = importlib.import_module("ucxx._lib.libucxx")
        self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        features = self.api.Feature.TAG, self.api.Feature.WAKEUP
        try:
            self._context = self.api.UCXContext(feature_flags=features)
            self.worker = self.api.UCXWorker(self._context)
            self.worker.init_blocking_progress_mode()
            self.worker.start_progress_thread(
                polling_mode=False, epoll_timeout=PROGRESS_MILLISECONDS
            )
            self.address = bytes(self.worker.address)
        except Exception as e:
            raise CarrierError(f"UCX does not start: {e}") from e
        self.sending = SlotPool(self._make_slots, SENDING_SLOTS)
        self.receiving = SlotPool(self._make_slots, RECEIVING_SLOTS)

    def outgoing(self) -> "_UcxOutgoing":
        return _UcxOutgoing(self)

    def incoming(self, blob: bytes) -> "_UcxIncoming":
        address, _ = decoded(blob)
        return _UcxIncoming(self, address)

    def endpoint(self, address: bytes) -> Any:
        """An endpoint to the port at this address of UCX's own.  Raises CarrierError."""
        try:
            there = self.api.UCXAddress.create_from_buffer(address)
            return self.worker.create_endpoint_from_worker_address(there, True)
        except Exception as e:
            raise CarrierError(f"UCX cannot reach its peer: {e}") from e

    def close(self) -> None:
        self.worker.stop_progress_thread()

    def _make_slots(self, num_slots: int) -> list[Slot]:
        memory = HostSlots(self._memory, num_slots * self._slot_bytes)
        return slots_of(memory, self._slot_bytes, num_slots)


def decoded(blob: bytes) -> _Blob:
    """Address and first tag of a side.  Raises CarrierError."""
    try:
        return _decode.decode(blob)
    except msgspec.MsgspecError as e:
        raise CarrierError(f"not what a UCX carrier says of itself: {e}") from e


class _Endpoint:
    """UCX's endpoint of one connection; its end ends all messages that are in flight."""

    def __init__(self, carrier: UcxCarrier, address: bytes) -> None:
        self._carrier = carrier
        self._endpoint = carrier.endpoint(address)

    def begin(self, method: str, data: Any, tag: int) -> Any:
        """method: tag_send or tag_recv.  Raises CarrierError."""
        try:
            begin = getattr(self._endpoint, method)
            return begin(self._carrier.array(data), self._carrier.api.UCXXTag(tag))
        except Exception as e:
            raise CarrierError(f"UCX: {e}") from e

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close_blocking(period=_CLOSE_NANOSECONDS, max_attempts=2)


class _UcxOutgoing:
    """Numbers its messages from the tag that the receiver chose."""

    def __init__(self, carrier: UcxCarrier) -> None:
        self.blob = _encode((carrier.address, 0))
        self._carrier = carrier
        self._endpoint: _Endpoint | None = None
        self._first_tag = 0
        self._num_posted = 0

    def connect(self, blob: bytes) -> None:
        address, self._first_tag = decoded(blob)
        self._endpoint = _Endpoint(self._carrier, address)

    def post(self, slot: Slot, num_bytes: int) -> int:
        if self._endpoint is None:
            raise CarrierError("UCX has no endpoint yet")
        number = self._num_posted
        self._num_posted += 1
        tag = self._first_tag + number
        request = self._endpoint.begin("tag_send", slot.bytes[:num_bytes], tag)
        slot.is_idle = lambda: bool(request.completed)
        return number

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()


class _UcxIncoming:
    """Chooses tags that no other connection to this port has."""

    def __init__(self, carrier: UcxCarrier, address: bytes) -> None:
        self._endpoint = _Endpoint(carrier, address)
        self._first_tag = secrets.randbits(_PLACE_BITS) << _PLACE_BITS
        self.blob = _encode((carrier.address, self._first_tag))

    def fetch(self, place: int, num_bytes: int, slot: Slot) -> Fetch:
        if place >> _PLACE_BITS:
            raise CarrierError(f"UCX: message {place} is none of this connection")
        tag = self._first_tag + place
        request = self._endpoint.begin("tag_recv", slot.bytes[:num_bytes], tag)

        def is_done() -> bool:
            if not request.completed:
                return False
            try:
                request.check_error()
            except Exception as e:
                raise CarrierError(f"UCX: {e}") from e
            return True

        return is_done

    def close(self) -> None:
        self._endpoint.close()
