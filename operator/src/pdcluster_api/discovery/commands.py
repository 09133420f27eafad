"""Drain commands and worker records of one cluster in etcd, all read at one moment. A command is
its key; its value holds its start. A record is removed only as it was read: a worker that has
written it since is alive.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from aetcd import rpc

from pdcluster_api.discovery.etcd import (
    TIMEOUT_SECONDS,
    Endpoint,
    EtcdTLS,
    RegisteredWorker,
    below,
    call_each,
    parse_record,
)
from pdcluster_api.errors import EtcdFullError, EtcdUnreachableError
from pdcluster_api.plan.observed.state import (
    StoppedTiers,
    WorkerDevice,
    WorkerDisaggregation,
)
from pdcluster_schema import etcd_keys
from pdcluster_schema.drain_command import DrainCommand


async def is_full(endpoints: Sequence[Endpoint], tls: EtcdTLS | None = None) -> bool:
    """Return whether the alarm NOSPACE is raised, which stops writes alone; an etcd that keeps its
    alarms to itself has none.
    """
    request = rpc.AlarmRequest(action=rpc.AlarmRequest.GET)
    try:
        response = await call_each(
            endpoints,
            tls,
            lambda etcd: etcd.Alarm(request, timeout=TIMEOUT_SECONDS),
            stub=rpc.MaintenanceStub,
        )
    except EtcdUnreachableError:
        return False
    return any(each.alarm == rpc.NOSPACE for each in response.alarms)


logger = logging.getLogger(__name__)
MAX_OPERATIONS = 100
"""Most operations of one transaction; etcd takes 128."""


@dataclass(frozen=True)
class StoredRecord:
    """version: etcd's revision of its last change."""

    key: str
    version: int
    record: RegisteredWorker


@dataclass(frozen=True)
class Registered:
    """Records by pod, and the start of each pod's drain command; None = its command has no time.
    is_full: etcd takes no writes
    """

    records: Mapping[str, StoredRecord] = field(default_factory=dict)
    commands: Mapping[str, datetime | None] = field(default_factory=dict)
    is_full: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)  # that pods are commanded to have
    graces: Mapping[str, int] = field(default_factory=dict)  # `DrainCommand.grace_seconds` by pod

    @property
    def states(self) -> dict[str, str]:
        return {pod: each.record.state for pod, each in self.records.items()}

    @property
    def serves(self) -> dict[str, str]:
        """Roles that workers have by a command, by pod."""
        found = {pod: each.record for pod, each in self.records.items()}
        return {pod: record.role for pod, record in found.items() if record.is_changed}

    @property
    def devices(self) -> dict[str, WorkerDevice]:
        found = {pod: each.record.device for pod, each in self.records.items()}
        return {pod: device for pod, device in found.items() if device is not None}

    @property
    def stopped_tiers(self) -> dict[str, StoppedTiers]:
        found = {pod: each.record.stopped_tiers for pod, each in self.records.items()}
        return {pod: tiers for pod, tiers in found.items() if tiers}

    @property
    def disaggregation(self) -> dict[str, WorkerDisaggregation]:
        found = {pod: each.record.disaggregation for pod, each in self.records.items()}
        return {pod: report for pod, report in found.items() if report is not None}


async def read_registered(
    endpoints: Sequence[Endpoint], namespace: str, name: str, tls: EtcdTLS | None = None
) -> Registered:
    """All records, of every revision, and all commands. Raises EtcdUnreachableError."""
    prefixes = (
        etcd_keys.commands_prefix(namespace, name),
        etcd_keys.records_prefix(namespace, name),
    )
    commanded, written = await _ranges(endpoints, tls, prefixes)
    commands: dict[str, datetime | None] = {}
    roles: dict[str, str] = {}
    graces: dict[str, int] = {}
    for item in commanded:
        pod = _key_of(item).removeprefix(prefixes[0])
        if pod.endswith(etcd_keys.ROLE_SUFFIX):
            roles[pod.removesuffix(etcd_keys.ROLE_SUFFIX)] = item.value.decode(errors="replace")
        else:
            command = DrainCommand.decode(item.value)
            commands[pod] = command.since
            if command.grace_seconds is not None:
                graces[pod] = command.grace_seconds
    records: dict[str, StoredRecord] = {}
    for item in written:
        _, _, place = _key_of(item).removeprefix(prefixes[1]).partition("/")
        if record := parse_record(place, item.value):
            records[record.pod] = StoredRecord(_key_of(item), item.mod_revision, record)
    return Registered(records, commands, await is_full(endpoints, tls), roles, graces)


async def _ranges(
    endpoints: Sequence[Endpoint], tls: EtcdTLS | None, prefixes: Sequence[str]
) -> list[Any]:
    """Keys and values below each prefix: with no right to more, and of one moment.

    An older etcd without room takes no transaction, not even of reads.
    """
    ranges = [below(prefix) for prefix in prefixes]
    reads = rpc.TxnRequest(success=[rpc.RequestOp(request_range=each) for each in ranges])
    try:
        responses = (await _transact(endpoints, tls, reads)).responses
    except EtcdFullError:
        return [(await call_each(endpoints, tls, partial(_range, each))).kvs for each in ranges]
    return [response.response_range.kvs for response in responses]


async def _range(request: Any, etcd: Any) -> Any:
    return await etcd.Range(request, timeout=TIMEOUT_SECONDS)


async def write_commands(
    endpoints: Sequence[Endpoint],
    namespace: str,
    name: str,
    *,
    drain: Mapping[str, datetime],
    serve: Collection[str] = (),
    roles: Mapping[str, str | None] | None = None,
    graces: Mapping[str, int] | None = None,
    tls: EtcdTLS | None = None,
) -> None:
    """Write drain commands with their start, and remove others.  Raises EtcdUnreachableError.

    serve:  pods that lose theirs
    roles:  commands to have one; None = that command is removed
    graces: `DrainCommand.grace_seconds`, by pod
    """
    added = [
        rpc.RequestOp(
            request_put=rpc.PutRequest(
                key=_key(namespace, name, pod),
                value=DrainCommand(since, (graces or {}).get(pod)).encode(),
            )
        )
        for pod, since in sorted(drain.items())
    ]
    withdrawn = [
        rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=_key(namespace, name, pod)))
        for pod in sorted(set(serve) - set(drain))
    ]
    changed = [
        _role_operation(etcd_keys.role_key(namespace, name, pod).encode(), role)
        for pod, role in sorted((roles or {}).items())
    ]
    operations = [*withdrawn, *added, *changed]
    for start in range(0, len(operations), MAX_OPERATIONS):
        await _transact(
            endpoints, tls, rpc.TxnRequest(success=operations[start : start + MAX_OPERATIONS])
        )


def _role_operation(key: bytes, role: str | None) -> Any:
    if role is None:
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=role.encode()))


async def remove_records(
    endpoints: Sequence[Endpoint], records: Iterable[StoredRecord], tls: EtcdTLS | None = None
) -> list[str]:
    """Remove records that are still as they were read; returns their pods. Raises
    EtcdUnreachableError.
    """
    removed = []
    for each in records:
        unchanged = rpc.Compare(
            result=rpc.Compare.EQUAL,
            target=rpc.Compare.MOD,
            key=each.key.encode(),
            mod_revision=each.version,
        )
        delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=each.key.encode()))
        response = await _transact(
            endpoints, tls, rpc.TxnRequest(compare=[unchanged], success=[delete])
        )
        if response.succeeded:
            logger.info("removed worker record key=%s", each.key)
            removed.append(each.record.pod)
    return removed


async def _transact(endpoints: Sequence[Endpoint], tls: EtcdTLS | None, request: Any) -> Any:
    return await call_each(endpoints, tls, lambda etcd: etcd.Txn(request, timeout=TIMEOUT_SECONDS))


def _key_of(item: Any) -> str:
    key: str = item.key.decode(errors="replace")
    return key


def _key(namespace: str, name: str, pod: str) -> bytes:
    return etcd_keys.command_key(namespace, name, pod).encode()
