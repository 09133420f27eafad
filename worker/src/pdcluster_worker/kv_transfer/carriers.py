"""The carriers of a port: opened by `engine.transport`, and the peers that they do not reach."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdcluster_schema.ports import NUM_KV_PORTS, NUM_UCX_PORTS
from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.kv_transfer.carrier import Carrier, CarrierError
from pdcluster_worker.kv_transfer.nixl_carrier import NixlCarrier
from pdcluster_worker.kv_transfer.outbox import PeerAddress
from pdcluster_worker.kv_transfer.ucx_carrier import UcxCarrier

logger = logging.getLogger(__name__)

TransportName = Literal["auto", "tcp", "nixl", "ucx"]


RETRY_SECONDS = 300.0
MAX_UNREACHED = 1024

_RDMA_DEVICES = Path("/sys/class/infiniband")
_MAX_PORT = 0xFFFF
_UCX_PORTS = "UCX_TCP_PORT_RANGE"


@dataclass(slots=True)
class Carriers:
    requested: str = ""  # what `engine.transport` says; empty where frames carry their payloads
    known: dict[str, Carrier] = field(default_factory=dict)  # by kind
    # Why not, and until when, by peer.
    unreached: dict[PeerAddress, tuple[float, str]] = field(default_factory=dict)

    def offers(self, peer: PeerAddress, now: float) -> tuple[str, ...]:
        until, _ = self.unreached.get(peer, (0.0, ""))
        return () if now < until else tuple(self.known)

    def why_not(self, peer: PeerAddress) -> str:
        """The reason why the last one failed there; empty = none did."""
        return self.unreached.get(peer, (0.0, ""))[1]

    def reached(self, peer: PeerAddress) -> None:
        self.unreached.pop(peer, None)

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
    if requested == "tcp":
        return Carriers()
    if requested != "auto":
        try:
            return Carriers(requested, {requested: makers[requested]()})
        except (ImportError, CarrierError) as e:
            raise ConfigError(
                f"engine.transport is {requested}, which this worker has not: {e}; install "
                f"pdcluster-worker[{requested}], or set engine.transport to auto or tcp"
            ) from e
    if not has_rdma():
        logger.info("transport=tcp: without an RDMA device UCX would go over TCP too, and slower")
        return Carriers()
    for kind, make in makers.items():
        try:
            return Carriers(kind, {kind: make()})
        except (ImportError, CarrierError) as e:
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
