"""All that these tests take from inside the operator and pdctl: when a name moves, this file alone
follows.

Objects go in as plain documents, and what comes out is plain data.
"""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from pdcluster_api.apiserver.connection import ApiMetrics
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.render import Owner, RenderSettings
from pdcluster_api.plan.autoscale.explain import explained
from pdcluster_api.plan.autoscale.values import Holding, Memory, Outcome, PoolFacts
from pdcluster_api.plan.cluster_status import plan_invalid
from pdcluster_api.plan.observed.state import (
    DecisionInput,
    DecisionStep,
    DiscoveryState,
    Observed,
    PairVerification,
    PairVerifications,
    Problem,
    ScalerState,
    ScalingDecision,
    WorkerDevice,
    WorkerDisaggregation,
    WorkerRecords,
    WriteFailure,
)
from pdcluster_api.rendering import Records, Rendering
from pdcluster_operator.controller import Controller, ControllerSettings
from pdcluster_operator.reconcile.apply_plan import tls_step
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import PoolPair, WorkloadId
from pdctl.cli import render
from pdctl.cli.main import main
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    Planned,
    failing_pod,
    identity,
    plan_all,
    running,
    workload,
)
from tests.operator.pods import pod_state, pod_states

__all__ = [
    "NOW",
    "DecisionInput",
    "DecisionStep",
    "DiscoveryState",
    "Holding",
    "Memory",
    "Observed",
    "PairVerification",
    "PairVerifications",
    "PoolFacts",
    "PoolPair",
    "Problem",
    "ScalingDecision",
    "WorkerDevice",
    "WorkerDisaggregation",
    "WorkerRecords",
    "WriteFailure",
    "failing_pod",
    "identity",
    "main",
    "pod_state",
    "pod_states",
    "workload",
]

Document = dict[str, Any]
UID = "00000000-0000-0000-0000-000000000001"
AT = datetime.fromisoformat(NOW)
ZEROS = render.UID
SITE = RenderSettings("worker:1", "etcd:1", "pdcluster-system", server_image="server:1")


def revision(document: Document) -> str:
    """The revision of an object's spec."""
    return revision_of(parse(document).spec)


def as_declared(document: Document, **fields: Any) -> Observed:
    """Observed state of an object whose workers are all ready."""
    cluster = parse(document)
    return running(cluster, **{"workloads": _whole(cluster), **fields})


def _whole(cluster: PDCluster) -> list[Any]:
    name, target = cluster.metadata.name, revision_of(cluster.spec)
    sizes = {
        WorkloadId(name, role, pool.name, target): pool.replicas
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
    }
    return [workload(of, size, pods=pod_states(of, range(size))) for of, size in sizes.items()]


def scaler(role: str, replicas: int, seen: int, writer: str | None = None) -> ScalerState:
    """The scaler of pool cpu."""
    return ScalerState(role, "cpu", replicas, seen, writer)


def reported(document: Document, observed: Observed, now: str = NOW) -> Document:
    """Status and events of one reconcile, and the workloads that it leaves, by replicas; the
    document may be one that is refused.
    """
    try:
        plan: Any = plan_all(parse(document), observed, now)
    except InvalidObjectError as e:
        plan = plan_invalid(e.faults, observed, now)
    found = {"status": plan.status, "events": [asdict(each) for each in plan.events]}
    if isinstance(plan, Planned):
        found["workloads"] = {each.id.name: each.replicas for each in plan.workloads}
        found["drain"] = sorted(plan.commands)
    return found


def sentences(outcome: Outcome) -> list[str]:
    """Return what a decision says of its steps and problems; sizes and inputs are facts."""
    return [
        f"  {subject} {rule} {before} to {after}: {why}" if before else f"  {why}"
        for subject, rule, before, after, why in explained(outcome.decision)
        if rule not in ("sees", "result")
    ]


def manifests(document: Document) -> Iterator[Mapping[str, Any]]:
    """All children of an object whose workers are ready; of Secrets the values' first lines."""
    cluster = parse(document)
    owner = Owner(cluster.metadata.name, cluster.metadata.namespace or "default", UID)
    metadata = {"name": owner.name, "namespace": owner.namespace, "uid": UID, "generation": 1}
    live = Live({**document, "metadata": metadata}, [])
    records = Records(cluster, live, owner, SITE.worker_image_for(cluster.spec.engine.type), True)
    plan = plan_all(cluster, as_declared(document), NOW)
    yield from Rendering(records, SITE).manifests(plan)
    for secret in tls_step(live, owner, AT).manifests:
        values = {
            key: base64.b64decode(value).splitlines()[0].decode()
            for key, value in secret["data"].items()
        }
        yield {**secret, "data": values}


def rendered(document: Document) -> list[Document]:
    return render.rendered(parse(document), SITE, NOW)


def metrics() -> Iterator[Document]:
    """Every family of the operator's /metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    ApiMetrics(registry)
    no_client: Any = None
    Controller(no_client, no_client, ControllerSettings(SITE, "operator-0"), registry)
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            owner: Any = collector if hasattr(collector, "_labelnames") else family
            yield {
                "name": family.name,
                "type": family.type,
                "help": family.documentation,
                "labels": list(owner._labelnames),
            }
