"""The carriers of a port, as `engine.transport` says, and their use by a connection that sends."""

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pdcluster_schema.ports import NUM_KV_PORTS, NUM_UCX_PORTS
from pdcluster_worker.engine.ports import KVMemory, TransferRoute
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.kv_transfer.carrier import Carrier, CarrierError, CarrierOutgoing, Slot
from pdcluster_worker.kv_transfer.inbox import DEAD_EPOCH
from pdcluster_worker.kv_transfer.nixl_carrier import NixlCarrier
from pdcluster_worker.kv_transfer.sharded import PeerAddress
from pdcluster_worker.kv_transfer.ucx_carrier import UcxCarrier

logger = logging.getLogger(__name__)

TransportName = Literal["auto", "tcp", "nixl", "ucx"]
TCP = TransferRoute("tcp")

RETRY_SECONDS = 300.0
MAX_UNREACHED = 1024

_RDMA_DEVICES = Path("/sys/class/infiniband")
_MAX_PORT = 0xFFFF
_UCX_PORTS = "UCX_TCP_PORT_RANGE"

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Carriers:
    """Carriers of a port, and the peers that they do not reach."""

    requested: str = ""  # what `engine.transport` says; empty where frames carry their payloads
    known: dict[str, Carrier] = field(default_factory=dict)  # by kind
    # Why not, and until when, by peer.
    unreached: dict[PeerAddress, tuple[float, str]] = field(default_factory=dict)

    def offers(self, peer: PeerAddress, now: float) -> tuple[str, ...]:
        until, _ = self.unreached.get(peer, (0.0, ""))
        return () if now < until else tuple(self.known)

    def failed(self, peer: PeerAddress, reason: str, now: float) -> None:
        self.unreached[peer] = (now + RETRY_SECONDS, reason)
        while len(self.unreached) > MAX_UNREACHED:
            del self.unreached[next(iter(self.unreached))]

    def close(self) -> None:
        for carrier in self.known.values():
            carrier.close()


def open_carriers(
    requested: TransportName, name: str, slot_bytes: int, memory: KVMemory
) -> Carriers:
    """Open what the setting asks for.

    name: unique for each port at each start.  slot_bytes: of the largest frame.
    memory: whose blocks go.
    Raises ConfigError where a named one cannot be had.
    """
    makers: dict[str, Callable[[], Carrier]] = {
        "nixl": lambda: NixlCarrier(name, slot_bytes, memory),
        "ucx": lambda: UcxCarrier(slot_bytes, memory),
    }
    kinds: Sequence[str] = () if requested == "tcp" else (requested,)
    if requested == "auto":
        kinds = tuple(makers) if has_rdma() else ()
        if not kinds:
            logger.info("transport=tcp: without an RDMA device UCX would go over TCP too, slower")
    for kind in kinds:
        try:
            return Carriers(kind, {kind: makers[kind]()})
        except (ImportError, CarrierError) as e:
            if requested != "auto":
                raise ConfigError(
                    f"engine.transport is {kind}, which this worker has not: {e}; install "
                    f"pdcluster-worker[{kind}], or set engine.transport to auto or tcp"
                ) from e
            logger.info("transport %s is not to be had: %s", kind, e)
    return Carriers()


def has_rdma() -> bool:
    """Return whether this machine shows an RDMA device to us."""
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def keep_ucx_within(first_kv_port: int) -> None:
    """Have UCX listen behind the KV ports, unless the environment says where."""
    first = first_kv_port + NUM_KV_PORTS
    if first_kv_port and first + NUM_UCX_PORTS <= _MAX_PORT:
        os.environ.setdefault(_UCX_PORTS, f"{first}-{first + NUM_UCX_PORTS - 1}")


class PeerCall(Protocol):
    """Sends a message over the connection and waits for its answer, decoded."""

    def __call__(self, question: bytes, decode: Callable[[bytes], Answer | int]) -> Answer:
        """Raises OSError."""


class CarrierSender:
    """The sending side of a carrier on one connection: attach, probe, then a slot for each frame.

    Frames carry their payloads until `attach` has worked.
    """

    def __init__(self, peer: PeerAddress, carriers: Carriers, clock: Callable[[], float]) -> None:
        self._peer = peer
        self._carriers = carriers
        self._clock = clock
        self._agreed = ""
        self._outgoing: CarrierOutgoing | None = None  # once attached
        # Slots of the frames in flight, in their order; None for one that carries its payload.
        self._placed: deque[Slot | None] = deque()
        self._num_brought = 0

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
        return bool(self._agreed) and self._outgoing is None

    def attach(self, epoch: bytes, call_peer: PeerCall) -> None:
        """Begin to use the carrier, if it reaches the peer.  epoch: of the next frame."""
        self._outgoing = outgoing = self._carrier.outgoing()
        self._num_brought = 0
        try:
            attach = wire.encode_attach(wire.Attach(epoch, outgoing.blob))
            answer = call_peer(attach, wire.decode_attached)
            if answer.refusal == DEAD_EPOCH:  # given up meanwhile: the next frame attaches
                self._detach()
                return
            refusal = call_peer(self._probe(outgoing, answer), wire.decode_ack).refusal
            self.answered()
        except CarrierError as e:
            refusal = str(e)
        if refusal is not None:
            self._unreached(refusal)
        else:
            self._carriers.unreached.pop(self._peer, None)

    def place(self, block_ids: Sequence[int], heads: range, block_bytes: int) -> int | None:
        """Copy these heads into a slot; returns its name, None if the frame carries it."""
        if self._outgoing is None or (slot := self._take_slot()) is None:
            return None
        for index, block_id in enumerate(block_ids):
            slot.memory.load(slot.start + index * block_bytes, block_id, heads)
        return self._outgoing.post(slot, len(block_ids) * block_bytes)

    def answered(self) -> None:
        slot = self._placed.popleft() if self._outgoing is not None else None
        if slot is not None:
            self._num_brought += 1
            self._carrier.sending.give_back(slot)

    def broke(self, reason: str) -> None:
        """The connection failed: a carrier that has brought a probe at most may bring no frame."""
        if self._num_brought <= 1 and any(slot is not None for slot in self._placed):
            self._unreached(reason)

    def route(self, place: int | None) -> TransferRoute:
        if place is not None:
            return TransferRoute(self._agreed)
        return TransferRoute("tcp", self._carriers.unreached.get(self._peer, (0.0, ""))[1])

    def leave(self) -> None:
        self._detach()
        self._agreed = ""

    @property
    def _carrier(self) -> Carrier:
        return self._carriers.known[self._agreed]

    def _probe(self, outgoing: CarrierOutgoing, answer: wire.Attached) -> bytes:
        """Acknowledged like a frame."""
        if answer.refusal is not None:
            raise CarrierError(answer.refusal)
        outgoing.connect(answer.blob)
        data = secrets.token_bytes(wire.PROBE_BYTES)
        if (slot := self._take_slot()) is None:
            raise CarrierError("no slot is free")
        slot.memory.write(slot.start, data)
        return wire.encode_probe(wire.CarrierProbe(outgoing.post(slot, len(data)), data))

    def _take_slot(self) -> Slot | None:
        slot = self._carrier.sending.take()
        self._placed.append(slot)
        return slot

    def _detach(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
            while self._placed:
                self.answered()
            self._outgoing = None

    def _unreached(self, reason: str) -> None:
        reason = f"not {self._agreed or self._carriers.requested}: {reason}"
        logger.warning("KV goes over tcp engine_id=%s address=%s %s", *self._peer, reason)
        self._carriers.failed(self._peer, reason, self._clock())
        self.leave()
