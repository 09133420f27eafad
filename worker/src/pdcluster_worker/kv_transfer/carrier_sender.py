"""The sending side of a carrier on one connection: attach, probe, then a slot for each frame."""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pdcluster_worker.engine.ports import TransferRoute
from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.kv_transfer.carrier import Carrier, CarrierError, Slot
from pdcluster_worker.kv_transfer.carriers import Carriers
from pdcluster_worker.kv_transfer.inbox import DEAD_EPOCH
from pdcluster_worker.kv_transfer.outbox import PeerAddress

logger = logging.getLogger(__name__)

TCP = TransferRoute("tcp")

Answer = TypeVar("Answer")


class PeerCall(Protocol):
    """Sends a message over the connection and waits for its answer, decoded."""

    def __call__(self, question: bytes, decode: Callable[[bytes], Answer | int]) -> Answer:
        """Raises OSError."""
        ...


class CarrierSender:
    """One per connection; frames carry their payloads until `attach` has worked."""

    def __init__(self, peer: PeerAddress, carriers: Carriers, clock: Callable[[], float]) -> None:
        self._peer = peer
        self._carriers = carriers
        self._clock = clock
        self._agreed = ""
        self._attached: _Attached | None = None

    @property
    def offers(self) -> tuple[str, ...]:
        return self._carriers.offers(self._peer, self._clock())

    def agree(self, offers: tuple[str, ...], carrier: str) -> None:
        """Note what the peer chose of them."""
        if carrier in offers:
            self._agreed = carrier
        elif offers:
            self._unreached("the peer has not got it")

    @property
    def is_enabled(self) -> bool:
        return bool(self._agreed) and self._attached is None

    def attach(self, epoch: bytes, call_peer: PeerCall) -> None:
        """Begin to use the carrier, if it reaches the peer.  epoch: of the next frame."""
        attached = self._attached = _Attached(self._carriers.known[self._agreed])
        try:
            answer = call_peer(attached.hello(epoch), wire.decode_attached)
            if answer.refusal == DEAD_EPOCH:  # given up meanwhile: the next frame attaches
                self._drop()
                return
            ack = call_peer(attached.probe(answer), wire.decode_ack)
            attached.answered()
        except CarrierError as e:
            self._unreached(str(e))
            return
        if ack.refusal is not None:
            self._unreached(ack.refusal)
        else:
            self._carriers.reached(self._peer)

    def place(self, block_ids: Sequence[int], heads: range, block_bytes: int) -> int | None:
        """Copy these heads into a slot; returns its name, None if the frame carries it."""
        if self._attached is None:
            return None

        def load(slot: Slot) -> None:
            for index, block_id in enumerate(block_ids):
                slot.memory.load(slot.start + index * block_bytes, block_id, heads)

        return self._attached.place(load, len(block_ids) * block_bytes)

    def answered(self) -> None:
        if self._attached is not None:
            self._attached.answered()

    def broke(self, reason: str) -> None:
        """The connection failed: a carrier that has brought a probe at most may bring no frame."""
        if self._attached is not None and self._attached.is_unproven:
            self._unreached(reason)

    def route(self, place: int | None) -> TransferRoute:
        if place is not None:
            return TransferRoute(self._agreed)
        return TransferRoute("tcp", self._carriers.why_not(self._peer))

    def leave(self) -> None:
        self._agreed = ""
        self._drop()

    def _drop(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    def _unreached(self, reason: str) -> None:
        reason = f"not {self._agreed or self._carriers.requested}: {reason}"
        logger.warning("KV goes over tcp engine_id=%s address=%s %s", *self._peer, reason)
        self._carriers.failed(self._peer, reason, self._clock())
        self.leave()


class _Attached:
    """The use of one carrier by one connection.  placed: slots of the frames in flight, in their
    order; None for one that carries its payload.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._outgoing = carrier.outgoing()
        self._placed: deque[Slot | None] = deque()
        self._num_brought = 0

    @property
    def is_unproven(self) -> bool:
        """True while a slot is not answered and no frame's has been: the first is the probe's."""
        return self._num_brought <= 1 and any(slot is not None for slot in self._placed)

    def hello(self, epoch: bytes) -> bytes:
        return wire.encode_attach(wire.Attach(epoch, self._outgoing.blob))

    def probe(self, answer: wire.Attached) -> bytes:
        """After the answer to `hello`; acknowledged like a frame."""
        if answer.refusal is not None:
            raise CarrierError(answer.refusal)
        self._outgoing.connect(answer.blob)
        data = secrets.token_bytes(wire.PROBE_BYTES)
        place = self.place(lambda slot: slot.memory.write(slot.start, data), len(data))
        if place is None:
            raise CarrierError("no slot is free")
        return wire.encode_probe(wire.CarrierProbe(place, data))

    def place(self, load: Callable[[Slot], None], num_bytes: int) -> int | None:
        slot = self._carrier.sending.take()
        self._placed.append(slot)
        if slot is None:
            return None
        load(slot)
        return self._outgoing.post(slot, num_bytes)

    def answered(self) -> None:
        slot = self._placed.popleft()
        if slot is not None:
            self._num_brought += 1
            self._carrier.sending.give_back(slot)

    def close(self) -> None:
        self._outgoing.close()
        while self._placed:
            self.answered()
