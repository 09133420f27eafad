"""The first part of a reconcile: read everything that its plan starts from. Nothing is written."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, UnavailableError, failure_of
from pdcluster_api.apiserver.kinds import CHILD_OF_NAME, PDCLUSTER, SECRET, Key
from pdcluster_api.apiserver.observe import Live, managed_etcd, observe
from pdcluster_api.apiserver.other_clusters import other_cluster
from pdcluster_api.apiserver.running_spec import as_it_runs
from pdcluster_api.certificates.authority import StoredSecret
from pdcluster_api.manifests.render import Owner
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, OtherCluster, Problem
from pdcluster_api.plan.status.discovery import discovery_answers
from pdcluster_api.rendering import Records
from pdcluster_operator.informer.cache import Cache, Name, ObjectVersion
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.session import ObservedInputs, Session
from pdcluster_schema import conditions
from pdcluster_schema.load import parse_stored
from pdcluster_schema.pdcluster import PDCluster

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
KEY_SECRET_POLL_SECONDS = 15.0

# A slice of long work ends with the first item after this time: one takes up to as much again
SLICE_SECONDS = 0.05

# PDClusters that are kept parsed, some 15 kB each: while one changes it is reconciled some times in
# a row
MAX_PARSED = 128


@dataclass(frozen=True)
class Observation:
    live: Live
    owner: Owner  # of its children: the PDCluster itself
    cluster: PDCluster
    observed: Observed
    inputs: ObservedInputs  # what the observation started from
    target: EtcdTarget  # where its workers are registered
    # until the next read of what comes with no event; None = nothing is due
    requeue_after_seconds: float | None
    is_fresh: bool = False  # its worker records were read for this reconcile


@dataclass
class ParsedClusters:
    """The last `MAX_PARSED` PDClusters that were reconciled, by uid and generation."""

    _parsed: "OrderedDict[tuple[str, int], PDCluster]" = field(default_factory=OrderedDict)

    def of(self, live: Live) -> PDCluster:
        version = live.uid, live.body["metadata"].get("generation", 0)
        cluster = self._parsed.pop(version, None)
        if cluster is None:
            cluster, unknown = parse_stored(live.body)
            if unknown:
                names = ",".join(unknown)
                logger.warning(
                    "ignored fields of another version key=%s fields=%s", live.key, names
                )
        self._parsed[version] = cluster
        if len(self._parsed) > MAX_PARSED:
            self._parsed.popitem(last=False)
        return cluster


async def in_slices(
    items: Iterable[Item], clock: Callable[[], float] = time.perf_counter
) -> list[Item]:
    """All items of an iterable, in slices between which the loop's other tasks have their turns:
    to unpack, render and compare the children of a large PDCluster takes seconds in all.
    """
    made: list[Item] = []
    began = clock()
    for item in items:
        made.append(item)
        if clock() - began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            began = clock()
    return made


async def live_cluster(client: ApiClient, cache: Cache, key: Key) -> Live | None:
    """The object and its children, from the cache; None = it is gone.  Children that came into the
    cache before their PDCluster are read: of them it kept no more than their identity. Raises
    UnavailableError.
    """
    for name in cache.unread(key):
        version = cache.version(name)
        body = await client.find(CHILD_OF_NAME[name.kind], name.namespace, name.name)
        if cache.version(name) == version:  # no watch has delivered it meanwhile
            cache.forget(name)
            if body is not None:
                cache.put(name.kind, body)
    found = cache.get(PDCLUSTER.name, *key)
    return None if found is None else Live(found, await in_slices(cache.children(key)))


def versions_of(cache: Cache, clusters: Iterable[Key]) -> dict[Key, ObjectVersion | None]:
    return {key: cache.version(Name(PDCLUSTER.name, *key)) for key in clusters}


def _others(cache: Cache, clusters: Iterable[Key]) -> dict[str, OtherCluster]:
    bodies = ((key.name, cache.get(PDCLUSTER.name, *key)) for key in clusters)
    return {name: other_cluster(body) for name, body in bodies if body is not None}


async def observe_cluster(
    client: ApiClient,
    live: Live,
    parsed: ParsedClusters,
    session: Session,
    change: int,
    *,
    cache: Cache,
    lost_nodes: Mapping[str, str] = MappingProxyType({}),
) -> Observation:
    """Read everything.  change: number of the cache's last one, before `live` was read from it
    Raises UnavailableError and InvalidObjectError.
    """
    cluster = as_it_runs(parsed.of(live), live)
    names = {model.cluster for model in cluster.spec.service.models}
    session.others = frozenset(Key(live.key.namespace, name) for name in names)
    versions = versions_of(cache, session.others)
    owner = Owner(live.key.name, live.key.namespace, live.uid)
    faults, requeue_after = await session.pod_faults.of(live)
    target, secret = EtcdTarget.of(cluster), cluster.spec.service.api_key_secret
    key_fault = await key_secret_fault(client, live.key.namespace, secret)
    # last: what etcd says while anything else is waited for would be known, and not planned for
    discovery = await _discovery(live, cluster, target, session, faults)
    outdated = Records(cluster, live, owner).outdated()
    observed: Observed = observe(
        live, discovery=discovery, faults=faults, outdated=outdated, key_fault=key_fault
    )
    observed = replace(
        observed,
        failures=session.failures,
        verifications=session.verification.observed(),
        others=_others(cache, session.others),
        lost_nodes=lost_nodes,
    )
    session.etcd.follow(target, is_tracked=cluster.spec.roles.prefill is not None)
    records = session.etcd.last(target, observed.workloads, is_up=discovery_answers(discovery))
    observed = replace(observed, worker_records=records)
    decision = session.autoscaling.follow(cluster, observed)
    attained = session.autoscaling.attainment(cluster, observed.status)
    observed = replace(observed, decision=decision, attainment=attained)
    if key_fault is not None:
        requeue_after = min(KEY_SECRET_POLL_SECONDS, requeue_after or KEY_SECRET_POLL_SECONDS)
    inputs = ObservedInputs(change, session.etcd.standing, faults, secret, versions)
    return Observation(live, owner, cluster, observed, inputs, target, requeue_after)


async def refresh_records(found: Observation, session: Session) -> Observation:
    records = await session.etcd.fresh(found.target, found.observed.workloads)
    return replace(found, observed=replace(found.observed, worker_records=records), is_fresh=True)


async def _discovery(
    live: Live,
    cluster: PDCluster,
    target: EtcdTarget,
    session: Session,
    faults: Mapping[str, Problem],
) -> DiscoveryState:
    if target.is_external:
        error = await session.etcd.error(target)
        return DiscoveryState(managed=False, error=error, is_full=session.etcd.is_full(target))
    etcd = cluster.spec.discovery.etcd
    state = managed_etcd(live, f"{live.key.name}-etcd", etcd.replicas, faults)
    is_full = session.etcd.is_full(target)
    return replace(state, is_full=is_full, in_memory=etcd.storage is None)


async def key_secret_fault(client: ApiClient, namespace: str, name: str | None) -> Problem | None:
    """Problem of a Secret of API keys without a usable key, or that cannot be read; without a key
    every request is refused.  None = there is a key, or no Secret is named. It is the user's and
    not watched, so it is read in each reconcile. Raises UnavailableError.
    """
    if name is None:
        return None
    try:
        secret = StoredSecret.of(await client.find(SECRET, namespace, name))
    except UnavailableError:
        raise
    except ClusterError as e:
        failure = failure_of(e, f"Secret {name}")
        message = f"{failure.object} of service.apiKeySecret cannot be read: {failure.message}"
        return Problem(failure.reason, message)
    if secret is None:
        wrong = "does not exist: make it with a key in each of its values"
    elif not any(is_key(entry, value) for entry, value in secret.data.items()):
        wrong = "holds no key: give it one word of printable ASCII in each of its values"
    else:
        return None
    message = (
        f"Secret {name} of service.apiKeySecret {wrong}, or leave apiKeySecret out; until then "
        "every request is refused"
    )
    return Problem(conditions.CONFIGURATION_REFUSED, message)


def is_key(entry: str, value: bytes) -> bool:
    key = value.strip()
    return not entry.startswith(".") and bool(key) and all(33 <= byte <= 126 for byte in key)
