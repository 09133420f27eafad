"""Workers of flexible pools that serve the other role: which should, and which do. Pure. They stay
in their StatefulSet; a record in the status says how many of its lowest ordinals it is.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_api.plan.autoscale.explain import read_flipped, write_flipped
from pdcluster_api.plan.autoscale.pools import flexible_pair
from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.plan.drain.draining import ordinal_of
from pdcluster_api.plan.observed.state import (
    Flipped,
    Observed,
    PodState,
    Previous,
    WorkerRecords,
    WorkloadState,
    mappings,
)
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey

FIELD = "flipped"
_OTHER = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True)
class FlippedSet:
    """The flipped workers of one StatefulSet, by its name."""

    flipped: Flipped
    name: str

    def as_status(self) -> dict[str, Any]:
        return {**write_flipped(self.flipped), "statefulSet": self.name}

    def has(self, pod: PodState) -> bool:
        return pod.workload.name == self.name and 0 <= ordinal_of(pod) < self.flipped.workers


def requested_flips(spec: PDClusterSpec, observed: Observed) -> FlippedSet | None:
    """By this decision, else by the record; None = none, or its StatefulSet serves no longer."""
    pair = flexible_pair(spec)
    if pair is None or spec.autoscale.mode != "On":
        return None
    if observed.decision is not None:
        flipped = observed.decision.flipped
        return None if flipped is None else _set_of(flipped, observed)
    field = Previous(observed.status).mapping("autoscaling")
    sizes = {
        (entry.get("role"), entry.get("pool")): entry.get("replicas")
        for entry in mappings(field.get("replicas"))
    }
    read = [_read(entry, pair) for entry in mappings(field.get(FIELD))]
    found = [each for each in read if each is not None and _fits(each[0], sizes)]
    sets = (_set_of(each, observed) for each, _ in found)
    named = zip(sets, (name for _, name in found), strict=True)
    return next((each for each, name in named if each is not None and each.name == name), None)


def _read(entry: Mapping[str, Any], pair: tuple[PoolKey, PoolKey]) -> tuple[Flipped, str] | None:
    try:
        found = read_flipped(entry)
    except (KeyError, TypeError, ValueError):
        return None
    is_known = {found.home, found.to} == set(pair) and found.workers
    return (found, str(entry.get("statefulSet"))) if is_known else None


def _fits(flipped: Flipped, sizes: Mapping[tuple[object, object], object]) -> bool:
    """Return whether the pool has as many workers by the same record, which users may edit."""
    size = sizes.get(flipped.home)
    return isinstance(size, int) and flipped.workers <= size


def _set_of(flipped: Flipped, observed: Observed) -> FlippedSet | None:
    state = _serving(flipped.home, observed)
    return None if state is None else FlippedSet(flipped, state.id.name)


def _serving(key: PoolKey, observed: Observed) -> WorkloadState | None:
    """The StatefulSet of a pool in the revision that serves."""
    states = [
        state
        for state in observed.workloads
        if (state.id.role, state.id.pool) == key
        and state.id.revision == observed.service_revision
        and not state.gone
    ]
    return max(states, key=lambda state: (state.ready, state.id), default=None)


def commanded_roles(flips: FlippedSet | None, states: Iterable[WorkloadState]) -> dict[str, str]:
    """The commands to have another role, by pod; one that is made again finds its command."""
    if flips is None or not any(state.id.name == flips.name and not state.gone for state in states):
        return {}
    numbers = range(flips.flipped.workers)
    return {f"{flips.name}-{number}": flips.flipped.to[0] for number in numbers}


def as_served(
    pair: tuple[PoolKey, PoolKey] | None, flips: FlippedSet | None, observed: Observed
) -> Observed:
    """Return what is there, with each flipped worker where it serves.  The record of a worker says
    which role it has; without one, its command does.
    """
    if pair is None:
        return observed
    records = observed.worker_records or WorkerRecords()
    commanded = commanded_roles(flips, observed.workloads)

    def is_away(pod: PodState) -> bool:
        known = records.serves if pod.name in records.states else commanded
        return known.get(pod.name) == _OTHER[pod.workload.role]

    found = [_without_away(state, pair, is_away) for state in observed.workloads]
    for state in [state for state in found if state.away]:
        pods = tuple(pod for pod in state.pods if pod.name in state.away)
        host = _host(state, found, pair)
        if host is not None:
            found[host] = _with_guests(found[host], pods)
    return replace(observed, workloads=found)


def _without_away(
    state: WorkloadState, pair: tuple[PoolKey, PoolKey], is_away: Callable[[PodState], bool]
) -> WorkloadState:
    if (state.id.role, state.id.pool) not in pair:
        return state
    away = [pod for pod in state.pods if is_away(pod)]
    ready = state.ready - sum(pod.ready for pod in away)
    return replace(state, away=frozenset(pod.name for pod in away), ready=max(0, ready))


def _host(
    state: WorkloadState, states: Sequence[WorkloadState], pair: tuple[PoolKey, PoolKey]
) -> int | None:
    """Index of the other pool's StatefulSet of the same revision."""
    to = next(key for key in pair if key != (state.id.role, state.id.pool))
    found = [
        (each.ready, index)
        for index, each in enumerate(states)
        if (each.id.role, each.id.pool) == to
        and each.id.revision == state.id.revision
        and not each.gone
    ]
    return max(found)[1] if found else None


def _with_guests(state: WorkloadState, pods: tuple[PodState, ...]) -> WorkloadState:
    ready = sum(pod.ready for pod in pods)
    return replace(state, ready=state.ready + ready, guests=(*state.guests, *pods))


def is_flipping(
    flips: FlippedSet | None, pair: tuple[PoolKey, PoolKey], observed: Observed
) -> bool:
    """Return whether a worker has yet to take, or to give back, the other role; True while that is
    not known.  observed: as served
    """
    records = observed.worker_records
    if records is None or records.error is not None:
        return True
    return any(
        not pod.terminating and (pod.name in state.away) != (flips is not None and flips.has(pod))
        for state in observed.workloads
        if (state.id.role, state.id.pool) in pair and not state.gone
        for pod in state.pods
    )


@dataclass(frozen=True)
class FlipState:
    """Flips as a decision takes them."""

    pair: tuple[PoolKey, PoolKey] | None = None  # the flexible pools
    requested: FlippedSet | None = None  # workers that should serve the other role
    may_flip: bool = False  # others may follow

    def num_away(self, key: PoolKey) -> int:
        return 0 if self.requested is None else self.requested.flipped.away(key)

    def known_to(self, facts: PoolFacts, observed: Observed, scraped: Collection[str]) -> PoolFacts:
        """Facts of a pool with those of its flips.  observed: as served"""
        if self.pair is None or facts.key not in self.pair:
            return facts
        return replace(
            facts,
            is_flipping=is_flipping(self.requested, self.pair, observed),
            may_flip=self.may_flip,
            has_next=_has_next(facts.key, self.requested, observed, scraped),
        )


def _has_next(
    key: PoolKey, flips: FlippedSet | None, observed: Observed, scraped: Collection[str]
) -> bool:
    """Return whether the next worker of a pool to take the other role is ready."""
    state = _serving(key, observed)
    number = flips.flipped.workers if flips is not None and flips.flipped.home == key else 0
    return state is not None and any(
        ordinal_of(pod) == number and pod.ready and not pod.terminating and pod.name in scraped
        for pod in state.pods
    )
