"""The autoscaler's record in the status. Pure. With mode On it sizes the pools and is written
before it is followed, so that a restarted operator goes on from it; with Advise it is shown only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdcluster_api.plan.autoscale.explain import (
    read_record,
    remembered,
    summary,
    write_flipped,
)
from pdcluster_api.plan.flips import FIELD as FLIPPED
from pdcluster_api.plan.flips import FlippedSet
from pdcluster_api.plan.observed.pools import DeclaredRevision, Workloads
from pdcluster_api.plan.observed.state import (
    Observed,
    Previous,
    ScalerState,
    WorkloadState,
    mappings,
)
from pdcluster_api.plan.result import PlannedEvent
from pdcluster_api.plan.sizes import PoolSize, together
from pdcluster_api.plan.status.condition import MAX_MESSAGE, Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.autoscale import AutoscaleSpec, BudgetSpec
from pdcluster_schema.sections import ENGINELESS
from pdcluster_schema.text import shortened
from pdcluster_schema.values import MAX_REPLICAS
from pdcluster_schema.workload import PoolKey, Workload

FIELD = "autoscaling"
ON, OFF = "On", "Off"


def recorded(status: Mapping[str, Any], mode: str) -> dict[PoolKey, int] | None:
    """The replicas of the last decision in a mode; None = there is none that can be read."""
    found = status.get(FIELD)
    if not isinstance(found, Mapping) or found.get("mode") != mode:
        return None
    try:
        sizes = {
            (str(each["role"]), str(each["pool"])): int(each["replicas"])
            for each in found["replicas"]
        }
        return {key: min(max(0, size), MAX_REPLICAS) for key, size in sizes.items()}
    except (KeyError, TypeError, ValueError):
        return None


def is_new(spec: AutoscaleSpec, observed: Observed) -> bool:
    decided = observed.decision
    if decided is None or spec.mode == OFF:
        return False
    before = [_without_set(each) for each in mappings(_field(observed.status).get(FLIPPED))]
    after = [] if decided.flipped is None else [write_flipped(decided.flipped)]
    return dict(decided.replicas) != recorded(observed.status, spec.mode) or before != after


def has_changed(spec: AutoscaleSpec, observed: Observed) -> bool:
    """Return whether a reconcile with this decision would write another status."""
    found = {
        condition.type: shortened(condition.message, MAX_MESSAGE)
        for condition in autoscale_conditions(spec, observed)
    }
    before = Previous(observed.status)
    return is_new(spec, observed) or found != {
        kind: before.condition(kind).get("message")
        for kind in words.AUTOSCALING
        if before.is_true(kind)
    }


def autoscaled(
    spec: AutoscaleSpec, sizes: Sequence[PoolSize], observed: Observed
) -> tuple[PoolSize, ...]:
    """Size of every pool: by this decision, else by the record, else as it was."""
    if spec.mode != ON:
        return tuple(sizes)
    known = recorded(observed.status, ON) or {}
    if observed.decision is not None:
        known = dict(observed.decision.replicas)
    scalers, found = _by_pool(observed.scalers), []
    for size in sizes:
        replicas, scaler = known.get(size.key, size.desired), scalers.get(size.key)
        is_written = scaler and (scaler.replicas, scaler.seen) == (replicas, size.pool.replicas)
        request = None if is_written else replicas
        followed = replace(size, desired=replicas, requested=replicas, request=request)
        found.append(followed if size.key in known else size)
    return together(found)


def _field(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return Previous(status).mapping(FIELD)


def _without_set(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "statefulSet"}


def autoscaling_fields(
    spec: AutoscaleSpec, observed: Observed, flips: FlippedSet | None = None
) -> dict[str, Any]:
    """Empty with mode Off; unchanged without a decision that changes something, but for flips,
    which a roll out ends.
    """
    before = observed.status.get(FIELD)
    flipped = {} if flips is None else {FLIPPED: [flips.as_status()]}
    if spec.mode == OFF:
        return {}
    decided = observed.decision
    if decided is None or not is_new(spec, observed):
        kept = {name: each for name, each in _field(observed.status).items() if name != FLIPPED}
        return {FIELD: {**kept, **flipped}} if kept else {}
    entries = before.get("lastDecisions") if isinstance(before, Mapping) else None
    sizes = [
        {"role": role, "pool": pool, "replicas": number}
        for (role, pool), number in decided.replicas.items()
    ]
    newest, *older = remembered(entries, decided)
    return {
        FIELD: {
            "mode": spec.mode,
            "replicas": sizes,
            **flipped,
            "lastDecisions": [{"mode": spec.mode, **newest}, *older],
        }
    }


def autoscale_conditions(spec: AutoscaleSpec, observed: Observed) -> Iterator[Condition]:
    """Obstacles of the autoscaler; without a decision, those of the last status."""
    if spec.mode == OFF:
        return
    previous, decided = Previous(observed.status), observed.decision
    for kind in words.AUTOSCALING:
        if decided is None:
            messages = (
                [str(previous.condition(kind).get("message", ""))] if previous.is_true(kind) else []
            )
        else:
            messages = [problem.message for problem in decided.problems if problem.reason == kind]
        if messages:
            yield Condition.true(kind, kind, "; ".join(messages))


def decision_events(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[PlannedEvent]:
    old, new = _newest(before), _newest(after)
    record = None if new is None or new == old else read_record(new)
    if record is None or not (text := summary(record)):
        return
    if after[FIELD].get("mode") == ON:
        yield PlannedEvent(words.AUTOSCALED, text)
    else:
        yield PlannedEvent(words.ADVISED, f"{text} is recommended; mode Advise changes nothing")


def _newest(status: Mapping[str, Any]) -> Any:
    found = status.get(FIELD)
    entries = found.get("lastDecisions") if isinstance(found, Mapping) else None
    return entries[0] if isinstance(entries, Sequence) and entries else None


def overridden(
    spec: AutoscaleSpec, sizes: Iterable[PoolSize], observed: Observed
) -> Iterator[PlannedEvent]:
    """Events for scales by others, which do not count."""
    known = recorded(observed.status, ON) if spec.mode == ON else None
    if known is None or is_new(spec, observed):
        return  # left to the next reconcile, which follows the record
    scalers, there = _by_pool(observed.scalers), Workloads(observed)
    for size in sizes:
        scaler = scalers.get(size.key)
        if scaler is None or size.key not in known:
            continue
        state = there.of(*size.key, observed.service_revision)
        # no request: both have yet to follow the record
        is_behind = state is not None and state.desired == scaler.replicas
        if scaler.replicas != size.desired and scaler.writer is not None and not is_behind:
            what = f"{scaler.writer} asked for {scaler.replicas} workers"
        elif scaler.seen not in (None, size.pool.replicas):
            what = f"replicas is now {size.pool.replicas} in the spec"
        else:
            continue
        text = (
            f"{'/'.join(size.key)}: {what}; the autoscaler alone decides, and keeps "
            f"{size.desired}: change its bounds or schedules, or set spec.autoscale.mode to Off"
        )
        yield PlannedEvent(words.SCALERS_OVERRIDDEN, text, warning=True)


def _by_pool(scalers: Iterable[ScalerState]) -> dict[PoolKey, ScalerState]:
    return {(scaler.role, scaler.pool): scaler for scaler in scalers}


def rollout_over_budget(
    spec: AutoscaleSpec,
    declared: DeclaredRevision,
    workloads: Iterable[Workload],
    sizes: Iterable[PoolSize],
    states: Iterable[WorkloadState],
) -> Condition | None:
    """RolloutOverBudget: a BlueGreen rollout needs more accelerators than autoscale.budget has.
    The budget does not bound it; the status says so before the first new worker. With mode On only.

    workloads: of both revisions, at their planned sizes
    sizes:     of the declared pools
    states:    workloads that are there: an older one may have other accelerators
    """
    there = {state.id: state for state in states}
    pools = {size.key: (size.pool.gpu, size.gpus_per_replica) for size in sizes}
    every, old = Counter[str](), Counter[str]()
    for workload in workloads:
        if workload.id.role in ENGINELESS:
            continue
        gpu, number = pools.get((workload.id.role, workload.id.pool), ("", 1))
        if state := there.get(workload.id):
            gpu, number = state.gpu or gpu, state.gpus_per_replica or number
        every[gpu] += number * workload.replicas
        if not declared.has(workload.id):
            old[gpu] += number * workload.replicas
    if spec.mode != ON or not old.total() or every.total() == old.total():
        return None
    beyond = ", ".join(_beyond(spec.budget, every))
    if not beyond:
        return None
    message = (
        f"revision {declared.revision} beside the old one needs {beyond}, until the old workers "
        "end; to stay within it, use rollout.strategy Recreate, or raise autoscale.budget"
    )
    return Condition.true(words.ROLLOUT_OVER_BUDGET, words.ROLLOUT_OVER_BUDGET, message)


def rollout_held(short: str | None) -> Condition | None:
    """RolloutOverBudget of a rolling roll out, which waits.  short: why; None = it goes on"""
    kind = words.ROLLOUT_OVER_BUDGET
    return None if short is None else Condition.true(kind, kind, short)


def _beyond(budget: BudgetSpec, held: Counter[str]) -> Iterator[str]:
    if budget.total is not None and held.total() > budget.total:
        over = held.total() - budget.total
        yield f"{held.total()} accelerators, {over} beyond budget.total {budget.total}"
    for gpu, limit in sorted(budget.per_gpu.items()):
        if held[gpu] > limit:
            yield f"{held[gpu]} {gpu}, {held[gpu] - limit} beyond budget.perGpu {limit}"
