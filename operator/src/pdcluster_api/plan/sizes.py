"""Facts of each pool for the autoscaler. Pure. Numbers are those of the serving revision;
accelerators are held by the pods of all revisions, each StatefulSet by itself.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdcluster_api.plan.autoscale.values import Holding, PoolFacts
from pdcluster_api.plan.drain.draining import ordinal_of
from pdcluster_api.plan.flips import FlipState, as_served
from pdcluster_api.plan.observed.pools import DeclaredRevision, Workloads
from pdcluster_api.plan.observed.state import (
    Observed,
    PodState,
    Previous,
    ScalerState,
    WorkloadState,
)
from pdcluster_api.plan.result import ScalerPlan
from pdcluster_schema import conditions, labels
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.values import MAX_REPLICAS, MAX_WORKERS
from pdcluster_schema.workload import PoolKey, Workload, WorkloadId


@dataclass(frozen=True)
class PoolSize:
    role: str
    pool: PoolSpec
    desired: int  # workers that count, within min and max
    requested: int  # what the scaler asks for, or will after this plan
    request: int | None  # replicas to write into the scaler now; None = its spec stays as it is
    gpus_per_replica: int = 1  # accelerators of one worker

    @property
    def key(self) -> PoolKey:
        return self.role, self.pool.name

    @property
    def note(self) -> str | None:
        """Note for a user that asked for another size; None = they got it."""
        if self.desired == self.requested:
            return None
        return f"pool {self.pool.name}: {self.requested} workers are asked for, {self._limit}"

    @property
    def _limit(self) -> str:
        if self.requested < self.desired:
            return f"minReplicas is {self.pool.min_replicas}"
        if self.desired == self.pool.max_replicas:
            return f"maxReplicas is {self.pool.max_replicas}"
        if self.desired == MAX_REPLICAS:
            return f"a pool has {MAX_REPLICAS} at most"
        return f"all pools have {MAX_WORKERS} at most together"


def pool_sizes(
    spec: PDClusterSpec, scalers: Iterable[ScalerState], before: Mapping[PoolKey, int]
) -> tuple[PoolSize, ...]:
    """The size of every declared pool, in the spec's order. A scaler's spec is the request; a
    pool's `replicas` seeds it, and is a request again only when it changes, so that an unchanged
    file never undoes a scale.  before: replicas until now; they seed a scaler that is not there
    """
    known = {(scaler.role, scaler.pool): scaler for scaler in scalers}
    return together(
        [
            _size(
                role,
                pool,
                known.get((role, pool.name)),
                before.get((role, pool.name), pool.replicas),
                spec.gpus_per_replica(role, pool),
            )
            for role, declared in spec.roles.present().items()
            for pool in declared.pools
        ]
    )


def together(sizes: Sequence[PoolSize]) -> tuple[PoolSize, ...]:
    """Sizes within the workers of one object: the greatest pools are cut to one level.  Not below
    minReplicas, which the spec keeps to that number itself.
    """

    def cut(size: PoolSize, level: int) -> int:
        return min(size.desired, max(level, size.pool.min_replicas or 0))

    if sum(size.desired for size in sizes) <= MAX_WORKERS:
        return tuple(sizes)
    levels = range(MAX_WORKERS + 1)
    level = (
        bisect_right(levels, MAX_WORKERS, key=lambda each: sum(cut(size, each) for size in sizes))
        - 1
    )
    return tuple(replace(size, desired=cut(size, level)) for size in sizes)


def _size(
    role: str, pool: PoolSpec, scaler: ScalerState | None, before: int, gpus_per_replica: int
) -> PoolSize:
    request: int | None = None
    if scaler is None:
        requested = request = clamp(before, pool)
    elif scaler.seen == pool.replicas:
        requested = scaler.replicas
    else:
        # Without its mark a change of `replicas` cannot be known: the scale stays, and the mark is
        # written again.
        requested = scaler.replicas if scaler.seen is None else pool.replicas
        request = min(requested, MAX_REPLICAS)
    return PoolSize(role, pool, clamp(requested, pool), requested, request, gpus_per_replica)


def clamp(replicas: int, pool: PoolSpec) -> int:
    high = MAX_REPLICAS if pool.max_replicas is None else pool.max_replicas
    return max(min(replicas, high), pool.min_replicas or 0)


def plan_scaler(
    cluster: str,
    size: PoolSize,
    shown: WorkloadState | None,
    serving: str,
    *,
    is_replaced: bool = False,
    together: int | None = None,
) -> ScalerPlan:
    """shown: the workload of its status, else that of the revision `serving`; is_replaced: its role
    has another one beside it; together: workers of all workloads of the pool, which serve together
    """
    if together is not None:
        of_pool = {labels.CLUSTER: cluster, labels.ROLE: size.role, labels.POOL: size.pool.name}
        selector_of_all = ",".join(f"{key}={value}" for key, value in of_pool.items())
        return ScalerPlan(
            *(size.role, size.pool.name, size.pool.replicas, size.request),
            {"replicas": together, "selector": selector_of_all},
        )
    # Labels of one workload, for HPA: a rollout counts no worker twice.
    selector = {
        labels.CLUSTER: cluster,
        labels.ROLE: size.role,
        labels.POOL: size.pool.name,
        labels.REVISION: serving if shown is None else shown.id.revision,
    }
    terms = [f"{key}={value}" for key, value in selector.items()]
    if shown is not None and shown.id.template:
        terms.append(f"{labels.TEMPLATE}={shown.id.template}")
    elif is_replaced:
        terms.append(f"!{labels.TEMPLATE}")
    replicas = 0 if shown is None else shown.current
    status = {"replicas": replicas, "selector": ",".join(terms)}
    return ScalerPlan(size.role, size.pool.name, size.pool.replicas, size.request, status)


PoolAccelerator = tuple[PoolKey, str]  # A pool, and a type of accelerator


@dataclass(frozen=True)
class RequestedSizes:
    sizes: Sequence[PoolSize]  # of the declared pools
    declared: DeclaredRevision
    # all that a reconcile makes or keeps, with sizes; declared pools follow theirs
    workloads: Sequence[Workload]
    given_up: frozenset[WorkloadId] = frozenset()  # those of them that are to have no workers
    is_rolling: bool = False  # workers of all revisions serve, and count for a pool's size together
    flips: FlipState = field(default_factory=FlipState)


@dataclass(frozen=True)
class ScrapeState:
    """State that only the process has."""

    # pods that were scraped in the last round; a pod that became ready since has no numbers yet
    scraped: Collection[str] = ()
    # seconds for which each pod has been unschedulable, by name
    waits: Mapping[str, float] = field(default_factory=dict)
    lost: Collection[str] = ()  # pods of lost nodes: none of their accelerators is there


def is_unschedulable(pod: PodState) -> bool:
    return (
        pod.problem is not None
        and pod.problem.reason == conditions.UNSCHEDULABLE
        and not pod.terminating
    )


def pool_facts(
    requested: RequestedSizes, observed: Observed, scrape_state: ScrapeState
) -> list[PoolFacts]:
    """Facts of every declared pool, then of those that are no longer declared and still have pods.
    Numbers are those of the serving revision, or of the declared one for pools without any;
    accelerators are held by the pods of all revisions, each StatefulSet by itself.
    """
    declared, kept = requested.declared, Previous(observed.status).kept()
    flips = requested.flips
    observed = as_served(flips.pair, flips.requested, observed)
    existing = Workloads(observed, declared)
    observed, lost = _without_lost(observed, scrape_state.lost)
    holdings, found = _holdings(requested, observed, lost), []
    for size in requested.sizes:
        serving = existing.serving(*size.key, observed.service_revision)
        state = serving or existing.of(*size.key, declared.revision)
        is_older = state is not None and not declared.has(state.id)
        before = kept.get(state.id.name, 0) if state is not None and is_older else 0
        num_held = sum(
            each.num_pods for each in observed.workloads if (each.id.role, each.id.pool) == size.key
        )
        facts = PoolFacts(
            size.role,
            size.pool.name,
            size.pool.gpu,
            size.desired - flips.num_away(size.key),
            current=num_held,
            ready=0,
            ending=num_held,
            gpus_per_replica=size.gpus_per_replica,
            holdings=holdings.pop((size.key, size.pool.gpu), ()),
            num_away=flips.num_away(size.key),
        )
        if requested.is_rolling:
            facts = _together(facts, requested, observed, scrape_state)
        elif state is not None:
            facts = _with_pods(facts, state, max(size.desired, before), scrape_state)
        if state is not None:
            num_lost = sum(ordinal < size.desired for ordinal in lost.get(state.id, ()))
            facts = replace(facts, lost=num_lost)
        found.append(flips.known_to(facts, observed, scrape_state.scraped))
    return [*found, *_undeclared(holdings)]


def _together(
    facts: PoolFacts, requested: RequestedSizes, observed: Observed, scrape_state: ScrapeState
) -> PoolFacts:
    """Facts of a pool with those of its workers of all revisions, which serve together."""
    sizes = {each.id: each.replicas for each in requested.workloads}
    found = [
        _with_pods(
            replace(facts, replicas=sizes.get(state.id, 0), current=state.num_pods),
            *(state, sizes.get(state.id, 0), scrape_state),
        )
        for state in observed.workloads
        if (state.id.role, state.id.pool) == facts.key and not state.gone
    ]
    ready = sum(each.ready for each in found)
    return replace(
        facts,
        ready=ready,
        ending=facts.current - sum(each.current - each.ending for each in found),
        unschedulable=sum(each.unschedulable for each in found),
        unschedulable_seconds=max((each.unschedulable_seconds for each in found), default=0.0),
        fault=next((each.fault for each in found if each.fault), None),
        leaving=frozenset[str]().union(*(each.leaving for each in found)),
        top=sum(each.top for each in found),
    )


def held_by_type(facts: Iterable[PoolFacts]) -> Counter[str]:
    """The most accelerators of each type at a time until every pool has its size."""
    sums = Counter[str]()
    for pool in facts:
        sums[pool.gpu] += pool.held(pool.replicas).accelerators
    return sums


def _without_lost(
    observed: Observed, names: Collection[str]
) -> tuple[Observed, Mapping[WorkloadId, tuple[int, ...]]]:
    """The objects without pods of lost nodes, and the ordinals of these pods."""
    lost = {state.id: tuple(sorted(lost_ordinals(state, names))) for state in observed.workloads}
    rest = [without_lost(state, names) if lost[state.id] else state for state in observed.workloads]
    return replace(observed, workloads=rest), lost


def without_lost(state: WorkloadState, names: Collection[str]) -> WorkloadState:
    """A workload without pods of lost nodes, which hold no accelerators."""
    pods = tuple(pod for pod in state.pods if not _is_lost(pod, names))
    num_lost = len(state.pods) - len(pods)
    return replace(state, current=max(0, state.current - num_lost), pods=pods)


def lost_ordinals(state: WorkloadState, names: Collection[str]) -> frozenset[int]:
    return frozenset(ordinal_of(pod) for pod in state.pods if _is_lost(pod, names))


def _is_lost(pod: PodState, names: Collection[str]) -> bool:
    return pod.terminating and pod.ending.name in names


def _holdings(
    requested: RequestedSizes, observed: Observed, lost: Mapping[WorkloadId, tuple[int, ...]]
) -> dict[PoolAccelerator, tuple[Holding, ...]]:
    planned = {workload.id: workload.replicas for workload in requested.workloads}
    states = {state.id: state for state in observed.workloads}
    before = {key: (gpu, 1) for key, (gpu, _) in Previous(observed.status).pools().items()}
    declared = {size.key: (size.pool.gpu, size.gpus_per_replica) for size in requested.sizes}
    found: defaultdict[PoolAccelerator, tuple[Holding, ...]] = defaultdict(tuple)
    for each in sorted({*planned, *states}):
        key, state, size = (each.role, each.pool), states.get(each), planned.get(each, 0)
        of = (before | declared).get(key, ("", 1))
        own = (state.gpu or of[0], state.gpus_per_replica or of[1]) if state else of
        grows = each in planned and key in declared and each not in requested.given_up
        if requested.is_rolling:
            grows = grows and requested.declared.has(each)
        # one as it is declared comes in its place
        if own != of and state is not None and state.gone:
            found[key, of[0]] += (_holding(None, size, of, grows=grows),)
            size, grows = 0, False
        holding = _holding(state, size, own, grows=grows)
        elsewhere = 0
        if requested.is_rolling:
            elsewhere = sum(
                planned[other]
                for other in planned
                if other != each and (other.role, other.pool) == key
            )
        found[key, own[0]] += (replace(holding, lost=lost.get(each, ()), elsewhere=elsewhere),)
    return found


def _holding(
    state: WorkloadState | None, planned: int, of: tuple[str, int], *, grows: bool
) -> Holding:
    _, gpus = of
    if state is None:
        return Holding(0, planned, (), grows, gpus)
    top = planned if state.gone else max(planned, state.desired)
    ordinals = tuple(sorted(ordinal_of(pod) for pod in state.pods))
    return Holding(state.current, top, ordinals, grows, gpus)


def _with_pods(
    facts: PoolFacts, state: WorkloadState, serving: int, scrape_state: ScrapeState
) -> PoolFacts:
    """Facts of one pool with those of its workload.  serving: ordinals below it serve, its size or
    more
    """
    size = facts.num_requested
    leaving = [pod for pod in state.pods if pod.terminating or ordinal_of(pod) >= serving]
    staying = [pod for pod in state.pods if pod not in leaving]
    waiting = [pod for pod in staying if is_unschedulable(pod) and ordinal_of(pod) < size]
    own = [pod for pod in staying if pod.name not in state.away]
    guests = [pod for pod in state.guests if not pod.terminating]
    scraped = scrape_state.scraped
    ready = [pod for pod in (*own, *guests) if pod.ready and pod.name in scraped]
    highest = max(
        (ordinal_of(pod) for pod in ready if pod in own and ordinal_of(pod) < size), default=-1
    )
    is_short = state.fault is not None and state.current < state.desired
    return replace(
        facts,
        ready=len(ready),
        ending=facts.current - len(staying),
        unschedulable=len(waiting),
        unschedulable_top=_num_top({ordinal_of(pod) for pod in waiting}, size),
        unschedulable_seconds=max(
            (scrape_state.waits.get(pod.name, 0.0) for pod in waiting), default=0.0
        ),
        fault=state.fault.message if state.fault is not None and is_short else None,
        leaving=frozenset(pod.name for pod in leaving),
        top=state.desired,
        unready_top=size - 1 - highest,
    )


def _num_top(ordinals: Collection[int], replicas: int) -> int:
    """Number of the highest ordinals that are among these, without a gap."""
    return next(
        (number for number in range(replicas) if replicas - 1 - number not in ordinals), replicas
    )


def _undeclared(holdings: Mapping[PoolAccelerator, Sequence[Holding]]) -> Iterable[PoolFacts]:
    for ((role, pool), gpu), each in sorted(holdings.items()):
        pods = Counter[int]()
        for holding in each:
            pods[holding.gpus_per_replica] += holding.held(0)
        for gpus, number in sorted((+pods).items()):
            name = f"{pool} of {gpu or 'an unknown type'}"
            yield PoolFacts(role, name, gpu, 0, number, 0, ending=number, gpus_per_replica=gpus)
