"""A small Kubernetes: it carries out plans as `reconcile` does, and runs the pods of StatefulSets
step by step.

It has no time.  Pods of a StatefulSet that is deleted end one by one, and those
that a spec breaks never become ready.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from pdcluster_api.plan.gates import as_rolled_back
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Observed,
    ScalerState,
    WorkloadState,
    WriteFailure,
)
from pdcluster_schema.conditions import IMAGE_NOT_PULLED
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    LATER,
    NOW,
    Planned,
    condition_of,
    failing_pod,
    plan_all,
)

Place = tuple[str, str]


@dataclass
class Pods:
    """The pods of one workload, by how far they are."""

    starting: int = 0
    ready: int = 0
    ending: int = 0

    @property
    def living(self) -> int:
        return self.starting + self.ready


@dataclass
class SimulatedCluster:
    """Objects of one PDCluster on the API server, and its pods.

    sets:   replicas of every StatefulSet
    retired: records that are marked as kept to go back to
    command: value of the annotation pdcluster.io/rollout
    broken: revisions, and templates within them, whose pods never become ready
    """

    generation: int = 1
    status: dict[str, Any] = field(default_factory=dict)
    sets: dict[WorkloadId, int] = field(default_factory=dict)
    pods: dict[WorkloadId, Pods] = field(default_factory=dict)
    records: set[WorkloadId] = field(default_factory=set)
    retired: set[WorkloadId] = field(default_factory=set)
    scalers: dict[Place, ScalerState] = field(default_factory=dict)
    service: str | None = None
    service_role: str | None = None
    is_wide: bool = False
    service_refused: bool = False
    discovery: DiscoveryState = ETCD_READY
    broken: set[str] = field(default_factory=set)
    failures: tuple[WriteFailure, ...] = ()
    command: str = ""

    def observe(self) -> Observed:
        known = sorted(
            {*self.sets, *(each for each, pods in self.pods.items() if pods.living + pods.ending)}
        )
        return Observed(
            generation=self.generation,
            status=self.status,
            discovery=self.discovery,
            workloads=[self._state(each) for each in known],
            records=sorted(self.records - self.retired),
            retired=sorted(self.retired),
            scalers=list(self.scalers.values()),
            service_revision=self._served if self.is_wide else self.service,
            service_role=self.service_role,
            service_is_wide=self.is_wide,
            failures=self.failures,
            rollout_command=self.command,
        )

    @property
    def _served(self) -> str | None:
        return self.status.get("servingRevision")

    def _state(self, workload: WorkloadId) -> WorkloadState:
        pods = self.pods.get(workload, Pods())
        is_broken = self._is_broken(workload)
        return WorkloadState(
            id=workload,
            desired=self.sets.get(workload, 0),
            current=pods.living + pods.ending,
            ready=pods.ready,
            updated=pods.living,
            gone=workload not in self.sets,
            pods=tuple(
                failing_pod(workload, ordinal, IMAGE_NOT_PULLED)
                for ordinal in range(pods.starting if is_broken else 0)
            ),
        )

    def _is_broken(self, workload: WorkloadId) -> bool:
        return not self.broken.isdisjoint({workload.revision, workload.template})

    def num_answering(self) -> int:
        """Ready workers behind the Service that their StatefulSet keeps."""
        return sum(
            min(pods.ready, self.sets.get(each, 0))
            for each, pods in self.pods.items()
            if each.role == self.service_role and (self.is_wide or each.revision == self.service)
        )

    def bound(self, cluster: PDCluster) -> PDCluster:
        """The cluster under the revision that it was rolled back to."""
        return as_rolled_back(cluster, self.status, self.command, {*self.sets, *self.records})

    def plan(self, cluster: PDCluster, now: str = NOW) -> Planned:
        return plan_all(self.bound(cluster), self.observe(), now)

    def carry_out(self, plan: Planned, *, crash: bool = False) -> None:
        """In the order of the operator: records, StatefulSets, scalers, Service, deletions, status.

        crash: the operator dies before the Service is written
        """
        wanted = {workload.id: workload.replicas for workload in plan.workloads}
        self.records |= set(wanted)
        self.retired = (self.retired | set(plan.retired)) - set(wanted)
        self.sets |= wanted
        for scaler in plan.scalers:
            place = (scaler.role, scaler.pool)
            if scaler.request is not None:
                self.scalers[place] = ScalerState(*place, scaler.request, scaler.seen)
        if crash:
            return
        if self.service_refused:
            self.failures = (WriteFailure("Service chat", "Forbidden", "may not be written"),)
        else:
            self.service, self.is_wide, self.failures = plan.serving, plan.is_wide, ()
            self.service_role = plan.serving_role
        for workload in {*self.sets, *self.records} - set(wanted):
            self.delete_set(workload)
        self.retired &= set(plan.retired)
        self.records &= set(wanted) | self.retired
        for place in set(self.scalers) - {(scaler.role, scaler.pool) for scaler in plan.scalers}:
            del self.scalers[place]
        self.status = dict(plan.status)

    def delete_set(self, workload: WorkloadId) -> None:
        """Its pods go with it, after their time to end."""
        self.sets.pop(workload, None)
        pods = self.pods.get(workload, Pods())
        self.pods[workload] = Pods(ending=pods.living + pods.ending)

    def step(self, workload: WorkloadId) -> None:
        """One pod goes on: an ending one ends, or a surplus one begins to, or a missing one starts,
        or a started one gets ready.
        """
        pods, desired = self.pods.setdefault(workload, Pods()), self.sets.get(workload, 0)
        if pods.ending:
            pods.ending -= 1
        elif pods.living > desired:
            self.fail(workload)
        elif pods.living < desired:
            pods.starting += 1
        elif pods.starting and not self._is_broken(workload):
            pods.starting, pods.ready = pods.starting - 1, pods.ready + 1

    def fail(self, workload: WorkloadId) -> None:
        """One pod begins to end."""
        pods = self.pods.setdefault(workload, Pods())
        if pods.starting:
            pods.starting, pods.ending = pods.starting - 1, pods.ending + 1
        elif pods.ready:
            pods.ready, pods.ending = pods.ready - 1, pods.ending + 1

    def lose_readiness(self, workload: WorkloadId) -> None:
        """One pod is no longer ready."""
        pods = self.pods.setdefault(workload, Pods())
        if pods.ready:
            pods.ready, pods.starting = pods.ready - 1, pods.starting + 1

    def scale(self, place: Place, replicas: int) -> None:
        """`kubectl scale` on the scaler."""
        self.scalers[place] = replace(self.scalers[place], replicas=replicas)

    def settle(self, cluster: PDCluster, rounds: int = 100) -> Planned:
        """Carry out plans and let pods go on until nothing changes any more; returns
        the last plan.
        """
        for _ in range(rounds):
            before = repr(self)
            plan = self.plan(cluster)
            self.carry_out(plan)
            for workload in sorted({*self.sets, *self.pods}):
                self.step(workload)
            if repr(self) == before:
                return plan
        raise AssertionError(f"no fixpoint in {rounds} rounds: {self}")


def declared_places(cluster: PDCluster) -> set[tuple[str, str]]:
    return {
        (role, each.name)
        for role, spec in cluster.spec.roles.present().items()
        for each in spec.pools
    }


def assert_at_rest(existing: SimulatedCluster, cluster: PDCluster) -> None:
    """Planning again, later, changes nothing: no write, no event, no byte of the status."""
    plan = existing.plan(cluster, LATER)
    assert json.dumps(plan.status) == json.dumps(existing.status)
    assert plan.events == ()
    assert {workload.id: workload.replicas for workload in plan.workloads} == existing.sets
    assert set(plan.retired) == existing.retired
    assert existing.records == existing.sets.keys() | existing.retired
    pools = declared_places(existing.bound(cluster))
    assert {(each.role, each.pool) for each in existing.retired} <= pools
    assert all(scaler.request is None for scaler in plan.scalers)
    if not existing.service_refused:
        assert plan.serving == existing.service


def assert_as_declared(existing: SimulatedCluster, cluster: PDCluster) -> None:
    target = revision_of(cluster.spec)
    assert existing.service == existing.status["servingRevision"] == target
    assert condition_of(existing.status, "Ready")["status"] == "True", existing.status
    pools = declared_places(cluster)
    assert {(workload.role, workload.pool, workload.revision) for workload in existing.sets} == {
        (*place, target) for place in pools
    }
    assert set(existing.scalers) == pools
