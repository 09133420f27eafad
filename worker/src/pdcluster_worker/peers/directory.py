"""The peers that this worker's role needs, kept in step with the membership.

A peer lives as long as its engine id: draining leaves its streams alone.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from pdcluster_schema.sections import ENGINELESS
from pdcluster_worker.config.worker import Role
from pdcluster_worker.errors import WorkerError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.calls import WorkerStub, open_channel
from pdcluster_worker.peers.client import NO_EVENTS, LocalWorker, Peer, PeerEvents, shake_hands
from pdcluster_worker.peers.records import WorkerRecord

logger = logging.getLogger(__name__)

_DECODING: tuple[Role, ...] = ("decode", "mixed")
_KEPT: tuple[Role, ...] = ("prefill", *_DECODING)
_NAMED = 4
"""Workers that an error names; a cell may have hundreds."""


class Directory:
    """pod_role: of this worker's pod, where a command gave it another."""

    def __init__(
        self, pod: str, local: LocalWorker, metrics: Metrics, pod_role: Role | None = None
    ) -> None:
        self._pod = pod
        self._pod_role = pod_role
        self._local = local
        self._metrics = metrics
        self._is_counted = True
        self._events = PeerEvents(self._on_credit, self._on_lost, self._on_change)
        self._reports = NO_EVENTS
        self._members: Mapping[str, WorkerRecord] = {}
        self._peers: dict[str, Peer] = {}
        # ready peers by role, until one changes
        self._found: dict[tuple[Role, ...], list[Peer]] = {}
        self._block_size: int | None = None  # likewise
        self._mixed_sizes: set[int] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def report_to(self, events: PeerEvents) -> None:
        """Set the callbacks, before the first member comes."""
        self._reports = events

    def prefills(self) -> list[Peer]:
        """Prefill workers that take new work."""
        return self._ready("prefill")

    def known_prefills(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.record.role == "prefill"]

    def decodes(self) -> list[Peer]:
        """Decode and mixed workers that take new work, without this one."""
        return self._ready(*_DECODING)

    def decode(self, pod: str) -> Peer | None:
        """A decode or mixed worker that is connected, also one that drains."""
        peer = self._peers.get(pod)
        return (
            peer
            if peer is not None and peer.state == "ready" and peer.record.role in _DECODING
            else None
        )

    def block_size(self) -> int:
        """That of most decode and mixed workers; 0 = none takes new work."""
        if self._block_size is None:
            sizes = Counter(peer.block_size for peer in self.decodes())
            self._block_size = max(sizes, key=lambda size: (sizes[size], size), default=0)
            if len(sizes) > 1 and self._mixed_sizes != sizes.keys():
                logger.warning(
                    "decode workers have KV blocks of several sizes, prefixes match on those of "
                    "most sizes=%s used=%d",
                    sorted(sizes),
                    self._block_size,
                )
            self._mixed_sizes = set(sizes)
        return self._block_size

    def members(self) -> list[WorkerRecord]:
        """All that are registered, this worker too, by pod."""
        return [record for _, record in sorted(self._members.items())]

    def peer(self, pod: str) -> Peer | None:
        """None of a member that this worker's role does not need."""
        return self._peers.get(pod)

    def known_decodes(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.record.role in _DECODING]

    def num_ingresses(self, *, relaying: bool = False) -> int:
        """Workers that clients' requests come to, this one included: routers if there are any, else
        decode and mixed ones; behind routers that relay, these.  Those that drain get no new
        connections.
        """
        ready = [
            record.pod_role or record.role
            for pod, record in self._members.items()
            if record.state == "ready" and pod != self._pod
        ]
        local = self._pod_role or self._local.hello.role
        are_behind = "router" in ready and not relaying
        roles = ("router",) if local == "router" or are_behind else _DECODING
        return max(1, sum(role in roles for role in ready) + (local in roles))

    def refused(self, role: Role) -> dict[str, str]:
        """Members of a role that the handshake refused, from either side: reason by pod."""
        members = [
            record
            for pod, record in self._members.items()
            if pod != self._pod and record.role == role
        ]
        reasons = {record.pod: self._local.refusals.reason(record.engine_id) for record in members}
        return {pod: reason for pod, reason in reasons.items() if reason is not None}

    def absence(self) -> str:
        """Reason why no decode or mixed worker takes new work, worker by worker."""
        members = [record for record in self.members() if record.role in _DECODING]
        if not members:
            return "none is registered"
        standings = [f"{record.pod} is {self._standing(record)}" for record in members[:_NAMED]]
        more = len(members) - _NAMED
        return ", ".join(standings) + (f", and {more} more" if more > 0 else "")

    def _standing(self, record: WorkerRecord) -> str:
        """State that keeps new work from a member: a word or, if refused, a reason."""
        if record.state != "ready" or not record.engine_id:
            return record.state if record.engine_id else "loading the model"
        peer = self._peers.get(record.pod)
        if peer is None:
            return "not connected"
        if peer.state == "refused":
            return f"refused: {self._local.refusals.reason(record.engine_id)}"
        return peer.load.state if peer.state == "ready" else peer.state

    def set_members(self, members: Mapping[str, WorkerRecord]) -> None:
        self._members = members
        needed = {pod: record for pod, record in members.items() if self._needs(record)}
        for pod, peer in list(self._peers.items()):
            if pod not in needed or not _is_same_worker(peer.record, needed[pod]):
                self._drop(pod)
        for pod, record in needed.items():
            if pod in self._peers:
                self._peers[pod].take_record(record)
            else:
                self._peers[pod] = Peer(record, self._local, self._events)
        self._count()

    async def probe(self, record: WorkerRecord) -> bool:
        """Return True if the engine of the record answers a handshake within HANDSHAKE_SECONDS."""
        channel = open_channel(record.grpc_address, self._local.credentials.channel)
        try:
            answer = await shake_hands(WorkerStub(channel), self._local.hello)
        except WorkerError:
            return False
        finally:
            await channel.close(None)
        return answer.engine_id == record.engine_id

    def end_count(self) -> None:
        """Leave the metric of peers to the directory that this worker has from now on."""
        if self._is_counted:
            self._metrics.peers.clear()
        self._is_counted = False

    async def close(self) -> None:
        peers = list(self._peers.values())
        self._peers.clear()
        self._forget_found()
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(
            *(peer.close() for peer in peers), *self._leaving, return_exceptions=True
        )
        self._count()

    def _needs(self, record: WorkerRecord) -> bool:
        # Without an engine id its engine is still loading: no handshake is possible.
        if record.pod == self._pod or not record.engine_id:
            return False
        local = self._local.hello.role
        if local == "prefill" and self._pod_role is None:
            return False
        # a prefill worker in a decode worker's pod passes clients' requests on
        return record.role in (_DECODING if local in ("prefill", *ENGINELESS) else _KEPT)

    def _ready(self, *roles: Role) -> list[Peer]:
        found = self._found.get(roles)
        if found is None:
            found = self._found[roles] = [
                peer for peer in self._peers.values() if peer.ready and peer.record.role in roles
            ]
        return [*found]

    def _drop(self, pod: str) -> None:
        task = asyncio.create_task(self._peers.pop(pod).leave())
        self._forget_found()
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _forget_found(self) -> None:
        self._found.clear()
        self._block_size = None

    def _on_credit(self, peer: Peer, request_id: str, granted: bool) -> None:
        self._reports.on_credit(peer, request_id, granted)

    def _on_lost(self, peer: Peer) -> None:
        self._forget_found()  # it is not asked again for what it has not answered
        self._reports.on_lost(peer)

    def _on_change(self, peer: Peer) -> None:
        self._count()
        self._reports.on_change(peer)

    def _count(self) -> None:
        self._forget_found()
        if not self._is_counted:
            return
        counts = Counter((peer.record.role, peer.state) for peer in self._peers.values())
        self._metrics.peers.clear()
        for (role, state), number in counts.items():
            self._metrics.peers.labels(role, state).set(number)


def _is_same_worker(old: WorkerRecord, new: WorkerRecord) -> bool:
    return (old.engine_id, old.grpc_address, old.role) == (
        new.engine_id,
        new.grpc_address,
        new.role,
    )
