"""The first part of a reconcile: read everything that its plan starts from.

From the cache, the events of the namespace, the Secrets that are the user's, and what is
known of the etcd.  Nothing is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.kinds import CHILD_OF_NAME
from pdcluster_api.apiserver.observe import Live, managed_etcd, observe
from pdcluster_api.manifests.render import Owner
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_api.plan.observed.state import DiscoveryState, Observed
from pdcluster_api.plan.status.discovery import discovery_answers
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.key_secret import KEY_SECRET_POLL_SECONDS, KeySecret
from pdcluster_operator.reconcile.records import Snapshots
from pdcluster_operator.reconcile.session import Session
from pdcluster_schema.pdcluster import PDCluster


@dataclass(frozen=True)
class Observation:
    """One PDCluster as it is.

    target:                where its workers are registered
    faults:                by StatefulSet, the problem that keeps it from getting pods
    requeue_after_seconds: until the next read of what comes with no event; None = nothing is due
    """

    live: Live
    cluster: PDCluster
    observed: Observed
    target: EtcdTarget
    requeue_after_seconds: float | None
    faults: Mapping[str, Problem] = field(default_factory=dict)


async def read_unread(client: ApiClient, cache: Cache, key: Key) -> None:
    """Read the children that came into the cache before their PDCluster, which kept no more than
    their identity.  Raises UnavailableError.
    """
    for name in cache.unread(key):
        version = cache.version(name)
        body = await client.find(CHILD_OF_NAME[name.kind], name.namespace, name.name)
        if cache.version(name) == version:  # no watch has delivered it meanwhile
            cache.forget(name)
            if body is not None:
                cache.put(name.kind, body)


async def observe_cluster(
    live: Live, cluster: PDCluster, session: Session, key_secret: KeySecret
) -> Observation:
    """Read everything.  Raises UnavailableError."""
    faults, requeue_after = await session.pod_faults.of(live)
    target = EtcdTarget.of(cluster)
    key_fault = await key_secret.fault(live.key.namespace, cluster.spec.service.api_key_secret)
    # last: what etcd says while anything else is waited for would be known, and not planned for
    discovery = await _discovery(live, cluster, target, session, faults)
    outdated = Snapshots(cluster, live, owner_of(live)).outdated()
    observed: Observed = observe(
        live, discovery=discovery, faults=faults, outdated=outdated, key_fault=key_fault
    )
    observed = replace(
        observed, failures=session.failures, verifications=session.verification.observed()
    )
    observed = replace(observed, decision=session.autoscaling.follow(cluster, observed))
    session.etcd.follow(target, is_tracked=cluster.spec.roles.prefill is not None)
    records = session.etcd.last(target, observed.workloads, is_up=discovery_answers(discovery))
    times = [
        seconds
        for seconds in (requeue_after, KEY_SECRET_POLL_SECONDS if key_fault else None)
        if seconds is not None
    ]
    observed = replace(observed, worker_records=records)
    return Observation(live, cluster, observed, target, min(times, default=None), faults)


async def refresh_records(found: Observation, session: Session) -> Observation:
    """Read the worker records again: an old read is no ground to remove a worker."""
    records = await session.etcd.fresh(found.target, found.observed.workloads)
    return replace(found, observed=replace(found.observed, worker_records=records))


def owner_of(live: Live) -> Owner:
    """The PDCluster, as its children name it."""
    return Owner(live.key.name, live.key.namespace, live.uid)


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
