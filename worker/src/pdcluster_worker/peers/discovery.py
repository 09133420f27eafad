"""Record of this worker in etcd, and the membership that etcd reports."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from math import inf

from pdcluster_schema.drain_command import DrainCommand
from pdcluster_schema.etcd_keys import pod_of, worker_key
from pdcluster_worker.backoff import Reconnect, run_until_first_ends
from pdcluster_worker.config.worker import DiscoveryConfig
from pdcluster_worker.peers.etcd import CALL_SECONDS, Etcd, EtcdError, EtcdListing, KeyEvent
from pdcluster_worker.peers.records import WorkerRecord, decode_record, encode_record
from pdcluster_worker.peers.tls import EtcdCredentials


class Membership:
    """A member leaves only when its key is gone and it answers no probe: an etcd that came back
    empty, or whose leases ran out meanwhile, reports the same of workers that are well.  One that
    had drained needs no probe.

    missing: members whose keys are gone and that must be probed."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._missing: set[str] = set()

    @property
    def records(self) -> dict[str, WorkerRecord]:
        """A copy, by pod."""
        return dict(self._records)

    @property
    def missing(self) -> list[WorkerRecord]:
        return [self._records[pod] for pod in sorted(self._missing)]

    def resync(self, listing: Mapping[str, WorkerRecord]) -> bool:
        """Take a full listing.  True if a member changed."""
        changed = [self.put(record) for record in listing.values()]
        changed += [self.delete(pod) for pod in self._records.keys() - listing.keys()]
        return any(changed)

    def put(self, record: WorkerRecord) -> bool:
        """True if that changes a member."""
        self._missing.discard(record.pod)
        changed = self._records.get(record.pod) != record
        self._records[record.pod] = record
        return changed

    def delete(self, pod: str) -> bool:
        """True if that alone removes the member; else it is missing from now on."""
        record = self._records.get(pod)
        if record is None:
            return False
        self._missing.add(pod)
        return record.state == "drained" and self.remove(record)

    def remove(self, record: WorkerRecord) -> bool:
        """The probe of a missing member failed.  False if it has written itself again meanwhile."""
        if record.pod not in self._missing or self._records[record.pod] != record:
            return False
        self._missing.discard(record.pod)
        del self._records[record.pod]
        return True


logger = logging.getLogger(__name__)


RECHECK_SECONDS = 2.0
"""Period of probes of members whose keys are gone: about as long as a probe may take, and short
against a lease.
"""


@dataclass(frozen=True, slots=True)
class DiscoveryKeys:
    """pinned: values that a revision agrees on, written where an etcd that came back empty lacks
    them.
    """

    workers_prefix: str
    command: str
    role: str
    pinned: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiscoveryEvents:
    """Callbacks, which must not block.

    on_members: all members by pod, this worker included, after every change.
    on_drain:   whether the drain command is present, and the grace period that it says, after every
                change.
    on_role:    the role by command, after every change; None = that of the pod.
    probe:      does the engine of this record answer?  Bounded in time, raises nothing.
    """

    on_members: Callable[[dict[str, WorkerRecord]], None]
    on_drain: Callable[[bool, float], None]
    on_role: Callable[[str | None], None]
    probe: Callable[[WorkerRecord], Awaitable[bool]]


class Discovery:
    """Any fault ends the session (lease, record, listing, watches); the next one begins at the next
    endpoint after a back-off.  Members stay during an outage of any length.

    Raises ConfigError when etcd's TLS files cannot be used at the start.

    problem:         why etcd does not serve this worker now; None while a session lives.
    registered_once: latches at the first registration.
    """

    def __init__(
        self, config: DiscoveryConfig, keys: DiscoveryKeys, events: DiscoveryEvents
    ) -> None:
        self.problem: str | None = "not registered in etcd yet"
        self.registered_once = False
        self._lease_seconds = config.lease_seconds
        self._tls = None if config.tls is None else EtcdCredentials(config.tls)
        self._endpoints: Iterator[str] = cycle(config.endpoints)
        self._keys = keys
        self._events = events
        self._membership = Membership()
        self._drain: tuple[bool, float] = (False, inf)
        self._role: str | None = None
        self._record_changed = asyncio.Event()
        self._has_missing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, record: WorkerRecord) -> None:
        """Register in a task of its own."""
        self._record = record
        self._task = asyncio.create_task(self._run(), name="discovery")

    def update(self, record: WorkerRecord) -> None:
        """Write a changed record of the same role, pool and pod: now, or when etcd is back."""
        self._record = record
        self._record_changed.set()

    async def close(self) -> None:
        """Revoke the lease (best effort, bounded in time) and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        retry = Reconnect()
        for endpoint in self._endpoints:
            retry.begin()
            reason = await self._attempt(endpoint)
            has_served = self.problem is None
            self._report_problem(f"etcd {endpoint}: {reason}")
            await retry.pause(has_served=has_served)

    async def _attempt(self, endpoint: str) -> str:
        """One session; returns why it ended."""
        try:
            credentials = None if self._tls is None else self._tls.channel()
            async with Etcd(endpoint, min(CALL_SECONDS, self._lease_seconds), credentials) as etcd:
                await self._serve(etcd)
        except EtcdError as e:
            return str(e)
        except Exception as e:
            # A fault of ours must not keep this worker out of etcd: log it, and start over.
            logger.exception("discovery failed")
            return f"{type(e).__name__}: {e}"
        return "the session ended"

    async def _serve(self, etcd: Etcd) -> None:
        lease_id = await etcd.grant(self._lease_seconds)
        try:
            # Commands first: a worker that starts under one must never be seen as ready.
            command = await etcd.read(self._keys.command)
            self._set_draining(next(iter(command.values.values()), None))
            role = await etcd.read(self._keys.role)
            self._set_role(role.values.get(self._keys.role))
            await self._pin(etcd)
            workers = await etcd.read(self._keys.workers_prefix)
            self._take_members(workers)
            await self._register(etcd, lease_id)
            if self.problem is not None:
                logger.info(
                    "registered in etcd cluster=%x revision=%d",
                    workers.cluster_id,
                    workers.revision,
                )
            self.problem = None
            await run_until_first_ends(
                self._keep_alive(etcd, lease_id),
                self._keep_record(etcd, lease_id),
                self._watch_workers(etcd, workers.revision + 1),
                self._watch_command(etcd, command.revision + 1),
                self._watch_role(etcd, role.revision + 1),
                self._recheck_missing(),
            )
        except asyncio.CancelledError:
            await self._take_leave(etcd, lease_id)
            raise

    async def _pin(self, etcd: Etcd) -> None:
        for key, value in self._keys.pinned.items():
            found = await etcd.create(key, value)
            if found != value:
                logger.warning("etcd has another value key=%s here=%r there=%r", key, value, found)

    async def _take_leave(self, etcd: Etcd, lease_id: int) -> None:
        """Best effort.  The record says that a drained worker needs no probe."""
        try:
            if self._record_changed.is_set():
                await self._put_record(etcd, lease_id)
            await etcd.revoke(lease_id)
        except EtcdError as e:
            logger.warning("left the worker record to its lease reason=%s", e)

    def _take_members(self, workers: EtcdListing) -> None:
        listed = [self._decode(key, value) for key, value in workers.values.items()]
        self._apply(
            self._membership.resync({record.pod: record for record in listed if record is not None})
        )

    async def _register(self, etcd: Etcd, lease_id: int) -> None:
        """It counts from the moment when others may see it, before etcd's answer comes."""
        before, self.registered_once = self.registered_once, True
        try:
            await self._put_record(etcd, lease_id)
        except BaseException:
            self.registered_once = before
            raise

    def _report_problem(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning(
                "etcd does not serve this worker members_kept=%d reason=%s",
                len(self._membership.records),
                problem,
            )
        self.problem = problem

    # parts of a session: each runs until it raises EtcdError

    async def _keep_alive(self, etcd: Etcd, lease_id: int) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            await etcd.keep_alive(lease_id)

    async def _keep_record(self, etcd: Etcd, lease_id: int) -> None:
        while True:
            await self._record_changed.wait()
            await self._put_record(etcd, lease_id)

    async def _watch_workers(self, etcd: Etcd, from_revision: int) -> None:
        async for events in etcd.watch(self._keys.workers_prefix, from_revision):
            # one by one: the last change of a record is reported before its deletion
            for event in events:
                self._apply(self._on_worker(event))

    async def _watch_command(self, etcd: Etcd, from_revision: int) -> None:
        async for events in etcd.watch(self._keys.command, from_revision):
            for event in events:
                self._set_draining(event.value)

    async def _watch_role(self, etcd: Etcd, from_revision: int) -> None:
        async for events in etcd.watch(self._keys.role, from_revision):
            for event in events:
                self._set_role(event.value)

    async def _recheck_missing(self) -> None:
        while True:
            await self._has_missing.wait()
            missing = self._membership.missing
            if not missing:
                self._has_missing.clear()
                continue
            answers = await asyncio.gather(*(self._events.probe(record) for record in missing))
            gone = [
                record
                for record, alive in zip(missing, answers, strict=True)
                if not alive and self._membership.remove(record)
            ]
            for record in gone:
                logger.info("member gone pod=%s engine=%s", record.pod, record.engine_id)
            self._apply(bool(gone))
            await asyncio.sleep(RECHECK_SECONDS)

    async def _put_record(self, etcd: Etcd, lease_id: int) -> None:
        # before the record is read: a change during the call is written by the next one
        self._record_changed.clear()
        try:
            await etcd.put(self._own_key(), encode_record(self._record), lease_id)
        except BaseException:
            self._record_changed.set()  # unknown whether it was written
            raise

    def _own_key(self) -> str:
        return worker_key(
            self._keys.workers_prefix, self._record.role, self._record.pool, self._record.pod
        )

    def _on_worker(self, event: KeyEvent) -> bool:
        """True if a member changed."""
        if event.value is None:
            if event.key == self._own_key():
                raise EtcdError("the record of this worker was deleted")
            return self._membership.delete(pod_of(event.key))
        record = self._decode(event.key, event.value)
        return record is not None and self._membership.put(record)

    def _decode(self, key: str, value: bytes) -> WorkerRecord | None:
        """An older record of this engine is written over: a call that timed out may be carried out
        late.
        """
        record = decode_record(key, value)
        if (
            record is not None
            and key == self._own_key()
            and record.engine_id == self._record.engine_id
            and record != self._record
        ):
            self._record_changed.set()
        return record

    def _apply(self, changed: bool) -> None:
        if self._membership.missing:
            self._has_missing.set()
        if changed:
            self._events.on_members(self._membership.records)

    def _set_draining(self, value: bytes | None) -> None:
        grace = None if value is None else DrainCommand.decode(value).grace_seconds
        drain = value is not None, inf if grace is None else grace
        if drain != self._drain:
            self._drain = drain
            logger.info("drain command present=%s grace_seconds=%g", *drain)
            self._events.on_drain(*drain)

    def _set_role(self, value: bytes | None) -> None:
        role = None if value is None else value.decode(errors="replace")
        if role != self._role:
            self._role = role
            logger.info("role command role=%s", role)
            self._events.on_role(role)
