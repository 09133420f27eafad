"""Declared pools beside what runs of them. Pure. `target` is the workload of the declared revision,
`shown` that of the serving one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from pdcluster_api.plan.observed.state import EndingPod, Observed, PodState, Problem, WorkloadState
from pdcluster_schema.conditions import NODE_LOST
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.revision import revision_of, templates_of
from pdcluster_schema.sections import ENGINELESS, PICKER, ROUTER
from pdcluster_schema.workload import WorkloadId

PREFILL: Final = "prefill"  # the one role that answers no HTTP of clients


def ingress_of(roles: Iterable[str]) -> str | None:
    """The one of these that answers clients: routers where there are any; None = none does.

    >>> ingress_of(["prefill", "decode", "router"]), ingress_of(["prefill",
    ...     "decode"]), ingress_of(["prefill"])
    ('router', 'decode', None)
    """
    found = [role for role in roles if role not in (PREFILL, PICKER)]
    return ROUTER if ROUTER in found else next(iter(found), None)


@dataclass(frozen=True)
class DeclaredPool:
    name: str
    gpu: str
    desired: int  # workers
    note: str | None = None  # remark on that number for a user; None = none
    num_away: int = 0  # how many more pods it has than serve its role; negative = fewer

    @property
    def num_pods(self) -> int:
        return self.desired + self.num_away


@dataclass(frozen=True)
class PoolView:
    declared: DeclaredPool
    current: int  # pods of all revisions
    target: WorkloadState | None
    shown: WorkloadState | None
    ending: tuple[PodState, ...] = ()  # terminating pods of the declared revision
    num_others: int = 0  # ready workers that serve beside those that are shown

    @property
    def desired(self) -> int:
        return self.declared.desired

    @property
    def ready(self) -> int:
        return self.num_others + (0 if self.shown is None else self.shown.ready)

    @property
    def updated(self) -> int:
        return 0 if self.target is None else self.target.updated - self.target.num_away

    @property
    def num_target_ready(self) -> int:
        """Ready workers of the declared revision that count: a surplus of one pool hides no
        lack of another, and routers that are still to be replaced are not as declared.
        """
        if self.target is None:
            return 0
        is_in_place = self.target.id.role in ENGINELESS
        most = min(self.desired, self.target.updated) if is_in_place else self.desired
        return min(self.target.ready, most)

    @property
    def is_ready(self) -> bool:
        """True if the declared revision has all its workers; surplus ones may drain."""
        return self.num_target_ready == self.desired


@dataclass(frozen=True)
class RoleView:
    name: str
    pools: tuple[PoolView, ...]

    @property
    def desired(self) -> int:
        return sum(pool.desired for pool in self.pools)

    @property
    def ready(self) -> int:
        return sum(pool.ready for pool in self.pools)

    @property
    def num_target_ready(self) -> int:
        return sum(pool.num_target_ready for pool in self.pools)

    @property
    def ending(self) -> list[EndingPod]:
        return [pod.ending for pool in self.pools if not pool.is_ready for pod in pool.ending]

    @property
    def is_ready(self) -> bool:
        return all(pool.is_ready for pool in self.pools)


@dataclass(frozen=True)
class DeclaredRevision:
    """A revision that a spec asks for, and the templates of roles that changed within it."""

    revision: str
    templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: PDClusterSpec) -> "DeclaredRevision":
        return cls(revision_of(spec), templates_of(spec))

    def __str__(self) -> str:
        return "-".join([self.revision, *(each for _, each in sorted(self.templates.items()))])

    def workload(self, cluster: str, role: str, pool: str) -> WorkloadId:
        return WorkloadId(cluster, role, pool, self.revision, self.templates.get(role, ""))

    def has(self, workload: WorkloadId) -> bool:
        """Return whether it is one of these, if its pool is declared."""
        template = self.templates.get(workload.role, "")
        return (workload.revision, workload.template) == (self.revision, template)


class Workloads:
    """By role, pool and revision.  declared: None = it is not known"""

    def __init__(self, observed: Observed, declared: DeclaredRevision | None = None) -> None:
        self._states, self._declared = observed.workloads, declared
        self._everywhere = observed.service_revision if observed.service_is_wide else None
        self._living: defaultdict[tuple[str, str, str], list[WorkloadState]] = defaultdict(list)
        for state in observed.workloads:
            if not state.gone:
                self._living[state.id.role, state.id.pool, state.id.revision].append(state)

    def of(self, role: str, pool: str, revision: str | None) -> WorkloadState | None:
        """The workload of one pool and revision, in the declared one with the declared template;
        None = there is none, or only terminating pods.
        """
        if self._declared is None or revision != self._declared.revision:
            return self.serving(role, pool, revision)
        states = self._living.get((role, pool, revision), ())
        return next((state for state in states if self._declared.has(state.id)), None)

    def serving(self, role: str, pool: str, revision: str | None) -> WorkloadState | None:
        """The same with most ready workers, while one takes the other's place."""
        states = self._living.get((role, pool, revision or ""), ())
        declared = self._declared
        return max(
            states,
            key=lambda state: (state.ready, declared is not None and declared.has(state.id)),
            default=None,
        )

    def replaced(self) -> list[WorkloadState]:
        """Workloads of the declared revision of which the role has another template now."""
        if self._declared is None:
            return []
        revision = self.of_revision(self._declared.revision)
        return [state for state in revision if not state.gone and not self._declared.has(state.id)]

    def of_revision(self, revision: str | None) -> list[WorkloadState]:
        return [state for state in self._states if state.id.revision == revision]

    def _reached(self, revision: str | None) -> Sequence[WorkloadState]:
        """Workloads of a revision; of all where the Service selects them with it."""
        is_wide = revision is not None and revision == self._everywhere
        return self._states if is_wide else self.of_revision(revision)

    def num_answering(self, revision: str | None, role: str | None = None) -> int:
        """Ready workers of a revision that answer clients; none while routers have no worker to
        give a request to.  role: of those that the Service leads to; None = the one that answers in
        that revision
        """
        ready = self._ready_by_role(revision)
        answering = role or self.ingress_role(revision)
        is_decoding = any(ready[each] for each in ready if each not in (PREFILL, *ENGINELESS))
        return ready[answering] if is_decoding else 0

    def has_prefill(self, revision: str | None) -> bool:
        return self._ready_by_role(revision)[PREFILL] > 0

    def ingress_role(self, revision: str | None) -> str | None:
        """The role of a revision that answers clients; None = it has no such workload."""
        return ingress_of(
            state.id.role
            for state in self._reached(revision)
            if state.id.role != ROUTER or state.desired
        )

    def decoding_role(self, revision: str | None) -> str | None:
        """The same without routers: of the workers behind them."""
        roles = (state.id.role for state in self._reached(revision))
        return ingress_of(role for role in roles if role != ROUTER)

    def view(
        self,
        role: str,
        pools: Iterable[DeclaredPool],
        *,
        target: str | None,
        serving: str | None,
        is_rolling: bool = False,
    ) -> RoleView:
        """is_rolling: workers of all workloads serve together"""
        views = (self._pool(role, pool, target, serving) for pool in pools)
        return RoleView(
            role, tuple(self._together(view, role) if is_rolling else view for view in views)
        )

    def _together(self, view: PoolView, role: str) -> PoolView:
        key = (role, view.declared.name)
        states = [each for each in self._states if (each.id.role, each.id.pool) == key]
        others = (each.ready for each in states if each is not view.shown and not each.gone)
        return replace(view, num_others=sum(others))

    def _ready_by_role(self, revision: str | None) -> Counter[str | None]:
        found = Counter[str | None]()
        for state in self._reached(revision):
            found[state.id.role] += 0 if state.gone else state.ready
        return found

    def _pool(
        self, role: str, pool: DeclaredPool, target: str | None, serving: str | None
    ) -> PoolView:
        declared, key = self.of(role, pool.name, target), (role, pool.name)
        states = [state for state in self._states if (state.id.role, state.id.pool) == key]
        same = (state for state in states if self._is_of(state.id, target))
        pods = (pod for state in same for pod in state.pods)
        return PoolView(
            pool,
            sum(state.current - state.num_away for state in states),
            target=declared,
            shown=self.serving(role, pool.name, serving) or declared,
            ending=tuple(pod for pod in pods if pod.terminating),
        )

    def _is_of(self, workload: WorkloadId, revision: str | None) -> bool:
        declared = self._declared
        if declared is not None and revision == declared.revision:
            return declared.has(workload)
        return workload.revision == revision


ENDING_SECONDS = 60.0  # Time beyond its grace period in which a pod ends, as it is killed then


@dataclass(frozen=True)
class Ending:
    """Terminating pods of a cluster, those of its etcd among them."""

    # names of those that should have been gone, or whose node is lost, for `ENDING_SECONDS`
    lost: frozenset[str] = frozenset()
    # names of the same, and of those whose node has just been lost
    stuck: frozenset[str] = frozenset()
    next_seconds: float | None = None  # until another one is lost; None = none can be


def ending_of(observed: Observed, now: str | None) -> Ending:
    """Look at every pod that ends.  now: RFC 3339; None = none is known as lost"""
    if now is None:
        return Ending()
    workers = (pod for state in observed.workloads for pod in state.pods if pod.terminating)
    pods = (*(pod.ending for pod in workers), *observed.discovery.ending)
    lefts = {pod.name: _seconds_left(pod, observed.lost_nodes, now) for pod in pods}
    lost = frozenset(name for name, left in lefts.items() if left <= 0)
    return Ending(
        lost,
        lost.union(pod.name for pod in pods if pod.node in observed.lost_nodes),
        min((left for left in lefts.values() if 0 < left < math.inf), default=None),
    )


def node_lost(pods: Iterable[EndingPod]) -> Problem | None:
    """Problem of lost pods, the way out included; None = there is none."""
    found = sorted(pods, key=lambda pod: pod.name)
    if not found:
        return None
    first, others = found[0], found[1:]
    delete = f"`kubectl delete pod {first.name} --force`"
    taint = f"kubectl taint node {first.node} node.kubernetes.io/out-of-service=nodeshutdown"
    fix = f"`{taint}:NoExecute`, or {delete}" if first.node else delete
    more = f" (and {len(others)} more)" if others else ""
    return Problem(
        NODE_LOST,
        f"{first}{more} has not ended: its node is lost, or cannot end it; once "
        f"the node is certainly off, {fix}",
    )


def _seconds_left(pod: EndingPod, lost_nodes: Mapping[str, str], now: str) -> float:
    """Seconds until a pod is lost; infinite where nothing of it is known."""
    since = [each for each in (pod.since, lost_nodes.get(pod.node)) if each is not None]
    if not since:
        return math.inf
    first = min(datetime.fromisoformat(each) for each in since)
    return ENDING_SECONDS - (datetime.fromisoformat(now) - first).total_seconds()
