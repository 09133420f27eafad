"""Workloads that should exist, at their full size, before any drain is looked at.

Pure.  There are three kinds: those of the declared revision, those of older
revisions that stay, and those of pools that are no longer declared and still answer.
"""

from collections.abc import Iterator

from pdcluster_api.plan.inputs import PlanInputs
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.rollout.steps import RolloutStep
from pdcluster_schema.workload import Workload, WorkloadId


def target_workloads(inputs: PlanInputs, step: RolloutStep) -> Iterator[Workload]:
    """Workloads of the declared revision; only the existing ones while an older one ends first."""
    for size in inputs.sizes:
        if step.waits_for is None or inputs.existing.of(*size.key, inputs.target):
            desired = 0 if inputs.is_rolled_back else size.desired
            yield Workload(
                WorkloadId(inputs.cluster.metadata.name, *size.key, inputs.target), desired
            )


def kept_workloads(inputs: PlanInputs, step: RolloutStep) -> Iterator[Workload]:
    """The older workloads that stay, at their pool's size; at their own size if that is more.

    So their scaler counts as ever and edits by hand do not, while a lower `replicas` that came
    with a new revision takes no worker from the serving one.  One whose pool is no longer
    declared keeps its size.
    """
    desired = {size.key: size.desired for size in inputs.sizes}
    for workload in step.kept:
        sizes = (desired.get((workload.role, workload.pool)), size_before(inputs, workload))
        yield Workload(workload, max((size for size in sizes if size is not None), default=1))


def size_before(inputs: PlanInputs, workload: WorkloadId) -> int | None:
    """Size of a workload that stays, as last planned; as it is when it begins to stay; None =
    unknown.
    """
    state = inputs.existing.of(workload.role, workload.pool, workload.revision)
    kept_sizes = Previous(inputs.observed.status).kept()
    return kept_sizes.get(workload.name, None if state is None else state.desired)


def leaving_pools(inputs: PlanInputs) -> tuple[Workload, ...]:
    """Pools of the serving revision that are no longer declared: they answer until their role is
    ready.

    One that answers nothing goes: it would only keep others from what they wait for.
    Not with Recreate, which removes the old pods first.
    """
    if inputs.current != inputs.target or inputs.cluster.spec.rollout.strategy == "Recreate":
        return ()
    declared = {size.key for size in inputs.sizes}
    unready = {view.name for view in inputs.views() if not view.is_ready}
    states = [
        state
        for state in inputs.existing.of_revision(inputs.target)
        if state.ready and not state.gone and state.id.role in unready
    ]
    left = [state for state in states if (state.id.role, state.id.pool) not in declared]
    return tuple(Workload(state.id, size_before(inputs, state.id) or 0) for state in left)
