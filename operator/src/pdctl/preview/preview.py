"""Preview of applying an object: fields, revision, accelerators, pools and refusals.

It compares the plan of the new object with what is there; a default equals a value left out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from pdcluster_api.plan.cluster import desired_state, requested_sizes, sizes_of
from pdcluster_api.plan.inputs import plan_inputs
from pdcluster_api.plan.observed.pools import DeclaredRevision
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Observed,
    Problem,
    ScalerState,
    ScalingDecision,
    WorkloadState,
)
from pdcluster_api.plan.rolling.planned import rolling_plan
from pdcluster_api.plan.rolling.steps import RollingStep, all_steps
from pdcluster_api.plan.sizes import PoolSize, ScrapeState, held_by_type, pool_facts
from pdcluster_schema.accelerators import NUMBERS, accelerators_text
from pdcluster_schema.continuation import continued, snapshots_of
from pdcluster_schema.faults import Fault
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.revision import revision_of, template_hash, templates_of
from pdcluster_schema.sections import ENGINELESS, PoolSpec
from pdcluster_schema.workload import PoolKey
from pdctl.preview.differences import changed_fields, immutable_faults
from pdctl.preview.forecast import forecast, upcoming_conflicts, why_resized

_UNKNOWN = "unknown"  # the accelerator of a pool that is declared no more


class Effect(Enum):
    REVISION = "new workers: a new revision"
    ROLE = "new workers of that role alone"
    ROUTERS = "routers: one after another, no other worker is replaced"
    NONE = "nothing: no worker gets another value"
    POLICY = "policy: in a minute or two, without a restart"
    MODE = "the owner of pool sizes: at once"
    AUTOSCALER = "the next decision of the autoscaler"
    ASLEEP = "nothing while autoscale.mode is Off"
    STEPS = "the steps of a rolling roll out"
    POOLS = "the size of a pool, see below"
    OVERRULED = "nothing: the autoscaler decides"
    BOUNDS = "the sizes that the pool may have"
    SERVICE = "the Service: at once, workers stay"
    OBJECTS = "the objects beside the workers: at once"
    ETCD = "the cluster's etcd: its pods restart"
    LATER = "what is made or ended from now on"
    ACCELERATORS = "pools of that type: their workers end, then new ones are made"
    UNUSED = "nothing: no pool names that type"
    LABELS = "the object alone"


_EFFECTS = (
    ("metadata.", Effect.LABELS),
    ("spec.routing.", Effect.POLICY),
    ("spec.qos.", Effect.POLICY),
    ("spec.autoscale.mode", Effect.MODE),
    ("spec.autoscale.", Effect.AUTOSCALER),
    ("spec.service.apiKeySecret", Effect.REVISION),
    ("spec.service.sharedPrefixCache", Effect.POLICY),
    ("spec.service.cors", Effect.POLICY),
    ("spec.service.limits", Effect.POLICY),
    ("spec.service.models", Effect.POLICY),
    ("spec.service.", Effect.SERVICE),
    ("spec.networkPolicy.", Effect.OBJECTS),
    ("spec.rollout.gracePeriodSeconds", Effect.REVISION),
    ("spec.rollout.", Effect.LATER),
    ("spec.accelerators.", Effect.ACCELERATORS),
    ("spec.discovery.etcd.endpoints", Effect.REVISION),
    ("spec.discovery.etcd.tlsSecret", Effect.REVISION),
    ("spec.discovery.etcd.", Effect.ETCD),
)
"""The first whose beginning fits; fields in no line are part of the revision."""


@dataclass(frozen=True)
class Change:
    """None = not given."""

    path: str
    before: Any
    after: Any
    effect: Effect


@dataclass(frozen=True)
class PoolChange:
    """Workers before and after; None = no such pool.  gpu: accelerators of each, as text."""

    key: PoolKey
    gpu: str
    before: int | None
    after: int | None
    note: str | None = None


@dataclass(frozen=True)
class Accelerators:
    """Accelerators of one type: now, at most during the rollout, and afterwards."""

    gpu: str
    now: int
    meanwhile: int
    after: int

    @property
    def extra(self) -> int:
        return max(0, self.meanwhile - self.now)


@dataclass(frozen=True)
class PreviewStep:
    """Workers of both revisions by role, and the most accelerators on the way to them, by type."""

    number: int
    steps: int
    new: Mapping[str, int]
    old: Mapping[str, int]
    accelerators: Mapping[str, int]


@dataclass(frozen=True)
class Preview:
    """Effects of applying an object.

    before:   the present revision; None = no object yet
    mode:     autoscale.mode before (None = no readable object) and after
    problems: limits of the autoscaler, as (condition, message)
    refused:  what the API server would refuse; nothing else would happen then
    """

    before: str | None
    after: str
    strategy: str
    mode: tuple[str | None, str] = (None, "Off")
    changes: tuple[Change, ...] = ()
    pools: tuple[PoolChange, ...] = ()
    accelerators: tuple[Accelerators, ...] = ()
    problems: tuple[Problem, ...] = ()
    refused: tuple[Fault, ...] = ()
    # roles of which the workers are replaced, each with the first field for which; empty = unknown
    replaced: Mapping[str, str] = field(default_factory=dict)
    # of a rolling roll out, as it goes if all goes well
    steps: tuple[PreviewStep, ...] = ()
    shortage: str | None = None  # what holds the last of them up

    @property
    def is_rollout(self) -> bool:
        return self.before is not None and self.before != self.after


def steady_state(cluster: PDCluster) -> Observed:
    """A cluster that is as declared: all workers ready, all scalers at `replicas`."""
    revision, pools = revision_of(cluster.spec), _declared(cluster.spec)
    declared = DeclaredRevision.of(cluster.spec)
    states = [
        WorkloadState(declared.workload(cluster.metadata.name, *key), size, size, size, size)
        for key, pool in pools.items()
        for size in (pool.replicas,)
    ]
    return Observed(
        generation=1,
        status={"revision": revision, "servingRevision": revision},
        discovery=DiscoveryState(
            managed=not cluster.spec.discovery.etcd.endpoints, ready=1, desired=1
        ),
        workloads=states,
        scalers=[
            ScalerState(role, name, pool.replicas, pool.replicas)
            for (role, name), pool in pools.items()
        ],
        service_revision=revision,
        records=[state.id for state in states],
    )


def preview_of_files(new: PDCluster, old: PDCluster, now: str) -> Preview:
    """Preview applying `new` to a cluster that is as `old` declares it."""
    return preview(continued(new, snapshots_of(old)), old, steady_state(old), now)


def preview(new: PDCluster, old: PDCluster | None, observed: Observed | None, now: str) -> Preview:
    """Preview applying `new`.

    old:      None = there is none, or it cannot be read
    observed: None = nothing runs
    now:      RFC 3339 in UTC
    """
    nothing = Observed(generation=0, status={}, discovery=DiscoveryState(managed=True))
    there = forecast(new, _typed(observed or nothing, old), now)
    after = revision_of(new.spec)
    before = there.service_revision if old is None else revision_of(old.spec)
    running = _running(there, after)
    sizes = sizes_of(new, there)
    known = {**({} if old is None else _declared(old.spec)), **_declared(new.spec)}
    replaced = {} if old is None else _replaced(old, new, is_rollout=before != after)
    changes = () if old is None else tuple(_changes(old, new, set(replaced), before != after))
    inputs = plan_inputs(new, there)
    rolling = rolling_plan(inputs)
    steps = () if rolling is None else tuple(all_steps(rolling.roles, rolling.budget))
    return Preview(
        before=before,
        after=after,
        strategy=inputs.strategy,
        mode=(None if old is None else old.spec.autoscale.mode, new.spec.autoscale.mode),
        changes=changes,
        pools=tuple(_pools(new.spec, sizes, running, known, there.decision)),
        accelerators=tuple(_accelerators(new, there, [held for _, held in steps])),
        problems=(
            *(() if there.decision is None else there.decision.problems),
            *_over_budget(new, there, now),
            *upcoming_conflicts(new.spec, now),
        ),
        refused=() if old is None else immutable_faults(old, new),
        replaced={
            role: next((each.path for each in changes if _concerns(each.path, role)), "")
            for role in replaced
        },
        steps=tuple(_steps(steps)),
        shortage=None if not steps or rolling is None else rolling.shortage_of(steps[-1][0]),
    )


def _steps(steps: Iterable[tuple[RollingStep, Counter[str]]]) -> Iterator[PreviewStep]:
    for step, held in steps:
        new, old = Counter[str](), Counter[str]()
        for (role, _), number in step.new.items():
            new[role] += number
        for workload, number in step.old.items():
            old[workload.role] += number
        yield PreviewStep(step.number, step.steps, new, old, held)


def _replaced(old: PDCluster, new: PDCluster, *, is_rollout: bool) -> list[str]:
    """Roles that both have, of which the workers are replaced."""
    both = [role for role in new.spec.roles.present() if role in old.spec.roles.present()]
    return [role for role in both if is_rollout or _differs(old.spec, new.spec, role)]


def _differs(old: PDClusterSpec, new: PDClusterSpec, role: str) -> bool:
    if role in ENGINELESS:
        return template_hash(old, role) != template_hash(new, role)
    return templates_of(old).get(role) != templates_of(new).get(role)


def _concerns(path: str, role: str) -> bool:
    """Return whether a field is of a role's pods, or of all pods."""
    is_of_another = path.startswith("spec.roles.") and not path.startswith(f"spec.roles.{role}.")
    return effect_of(path) is Effect.REVISION and not is_of_another


def _changes(
    old: PDCluster, new: PDCluster, replaced: Set[str], is_rollout: bool
) -> Iterator[Change]:
    named = {pool.gpu for pool in _declared(old.spec).values()}
    for path, before, after in changed_fields(old, new):
        effect = effect_of(path)
        if effect is Effect.REVISION and not is_rollout:
            effect = _within_revision(path, replaced)
        elif effect is Effect.AUTOSCALER and new.spec.autoscale.mode == "Off":
            effect = _without_autoscaler(path, new.spec)
        elif (
            effect is Effect.POOLS
            and new.spec.autoscale.mode == "On"
            and before is not None
            and path.endswith("].replicas")
        ):
            effect = Effect.OVERRULED
        elif effect is Effect.ACCELERATORS and not any(
            path.startswith(f"spec.accelerators.{gpu}.") for gpu in named
        ):
            effect = Effect.UNUSED
        yield Change(path, before, after, effect)


def _without_autoscaler(path: str, spec: PDClusterSpec) -> Effect:
    is_budget = path.startswith("spec.autoscale.budget.")
    return Effect.STEPS if is_budget and spec.rollout_strategy == "Rolling" else Effect.ASLEEP


def _within_revision(path: str, replaced: Set[str]) -> Effect:
    """Effect of a field of pods where the revision stays."""
    mine = {role for role in replaced if _concerns(path, role)}
    return Effect.ROLE if mine.difference(ENGINELESS) else Effect.ROUTERS if mine else Effect.NONE


def effect_of(path: str) -> Effect:
    if path.startswith("spec.roles.") and ".pools[" in path:
        if path.endswith(".flexible"):
            return Effect.AUTOSCALER
        return Effect.BOUNDS if path.endswith(("minReplicas", "maxReplicas")) else Effect.POOLS
    if path.startswith("spec.accelerators.") and path.endswith(NUMBERS):
        return Effect.POLICY
    return next((effect for start, effect in _EFFECTS if path.startswith(start)), Effect.REVISION)


def _declared(spec: PDClusterSpec) -> dict[PoolKey, PoolSpec]:
    return {
        (role, pool.name): pool
        for role, declared in spec.roles.present().items()
        for pool in declared.pools
    }


def _running(observed: Observed, revision: str) -> dict[PoolKey, int]:
    """Workers of each pool, of the serving revision if there is one."""
    serving = observed.service_revision or revision
    living = [state for state in observed.workloads if not state.gone]
    chosen = [state for state in living if state.id.revision == serving] or living
    return {(state.id.role, state.id.pool): state.desired for state in chosen}


def _pools(
    spec: PDClusterSpec,
    sizes: Iterable[PoolSize],
    running: Mapping[PoolKey, int],
    known: Mapping[PoolKey, PoolSpec],
    decided: ScalingDecision | None,
) -> Iterator[PoolChange]:
    found = set()
    for size in sizes:
        found.add(size.key)
        note = why_resized(decided, size) or size.note or _ignored(spec, size)
        gpus = accelerators_text(size.pool.gpu, size.gpus_per_replica)
        yield PoolChange(size.key, gpus, running.get(size.key), size.desired, note)
    for key, workers in running.items():
        if key not in found:
            yield PoolChange(key, known[key].gpu if key in known else _UNKNOWN, workers, None)


def _ignored(spec: PDClusterSpec, size: PoolSize) -> str | None:
    """Reason why a pool's `replicas` are ignored; None = they count."""
    if size.desired == size.pool.replicas:
        return None
    if spec.autoscale.mode == "On":
        return f"the autoscaler decides, not the file's replicas ({size.pool.replicas})"
    return (
        f"it was scaled; the file's replicas ({size.pool.replicas}) is not new and asks for nothing"
    )


def _accelerators(
    cluster: PDCluster, there: Observed, steps: Sequence[Counter[str]]
) -> Iterator[Accelerators]:
    """steps: the most accelerators on the way through each of a rolling roll out"""
    now, after = Counter[str](), Counter[str]()
    for state in there.workloads:
        number = state.current if state.gone else max(state.current, state.desired)
        now[state.gpu or _UNKNOWN] += number * (state.gpus_per_replica or 1)
    for size in sizes_of(cluster, there):
        after[size.pool.gpu] += size.desired * size.gpus_per_replica
    meanwhile = held_by_type(pool_facts(requested_sizes(cluster, there), there, ScrapeState()))
    if steps:
        meanwhile = Counter({gpu: max(held[gpu] for held in steps) for gpu in set().union(*steps)})
    meanwhile[_UNKNOWN] += meanwhile.pop("", 0)
    for gpu in sorted({*now, *+meanwhile, *after}):
        yield Accelerators(gpu, now[gpu], max(meanwhile[gpu], now[gpu], after[gpu]), after[gpu])


def _over_budget(new: PDCluster, there: Observed, now: str) -> Iterator[Problem]:
    over = desired_state(new, there, now).over_budget
    if over is not None:
        yield Problem(over.reason, over.message)


def _typed(observed: Observed, old: PDCluster | None) -> Observed:
    """Adds missing accelerator types of workers from the existing object's pools."""
    if old is None:
        return observed
    known = _declared(old.spec)

    def typed(state: WorkloadState) -> WorkloadState:
        pool = known.get((state.id.role, state.id.pool))
        if pool is None or state.gpu not in ("", pool.gpu):
            return state
        number = state.gpus_per_replica or old.spec.gpus_per_replica(state.id.role, pool)
        return replace(state, gpu=pool.gpu, gpus_per_replica=number)

    return replace(observed, workloads=[typed(state) for state in observed.workloads])
