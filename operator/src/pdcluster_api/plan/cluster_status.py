"""The status of one cluster, and the events of its changes.  Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from pdcluster_api.plan.cluster import DesiredState
from pdcluster_api.plan.drain.disruption import ReadinessDeadline, next_loss
from pdcluster_api.plan.drain.draining import DRAIN_POLL_SECONDS
from pdcluster_api.plan.gated import GateResult, checked_since, gate_result, of_gate
from pdcluster_api.plan.gates import gate_field
from pdcluster_api.plan.history import history_field
from pdcluster_api.plan.inputs import PlanInputs
from pdcluster_api.plan.observed.pools import PREFILL, DeclaredPool, RoleView, Workloads
from pdcluster_api.plan.observed.state import Observed, Previous, Problem
from pdcluster_api.plan.result import StatusPlan
from pdcluster_api.plan.rollout import Rollout, current_revision, rollout_field, seconds_left
from pdcluster_api.plan.status.accelerators import accelerators_in_use
from pdcluster_api.plan.status.autoscaled import (
    autoscale_conditions,
    autoscaling_fields,
    decision_events,
    overridden,
)
from pdcluster_api.plan.status.condition import (
    Condition,
    dated,
    identity_fields,
    kept_field,
    number_fields,
)
from pdcluster_api.plan.status.conditions import StatusInputs, condition_tree, progress_of
from pdcluster_api.plan.status.disaggregating import (
    DisaggregationResult,
    disaggregating,
    reports_of,
)
from pdcluster_api.plan.status.events import events
from pdcluster_api.plan.status.kv_tiers import kv_tiers_available
from pdcluster_api.plan.status.other_models import other_models_served
from pdcluster_api.plan.status.transfers import Pairs, Transfers, VerificationSettings, transfers
from pdcluster_schema import conditions as words
from pdcluster_schema.faults import Fault
from pdcluster_schema.sections import ENGINELESS, ROUTER


def plan_status(desired: DesiredState) -> StatusPlan:
    inputs, step, now = desired.inputs, desired.step, desired.now
    observed, autoscale = inputs.observed, inputs.cluster.spec.autoscale
    previous, views = Previous(observed.status), tuple(inputs.views())
    facts = _inputs(desired, views)
    disaggregation, verified = _disaggregation(desired, previous)
    gate = gate_result(desired, verified.check)
    facts = replace(facts, gate=gate.of_ready, step=_step_text(facts.step, gate))
    found = (
        *condition_tree(facts),
        desired.registered.condition,
        accelerators_in_use(inputs.cluster, views, observed.worker_records, previous),
        kv_tiers_available(inputs.cluster, views, observed.worker_records, previous),
        other_models_served(inputs.cluster, observed.others),
        disaggregation.condition,
        verified.condition,
        desired.over_budget,
        gate.condition,
        *autoscale_conditions(autoscale, observed),
    )
    conditions = [each for each in found if each is not None]
    status = {
        "observedGeneration": observed.generation,
        **identity_fields(inputs.cluster, revision=inputs.target, serving=step.serving),
        **number_fields(views),
        **rollout_field(_restarted(desired, gate), *_step_of(desired)),
        **gate_field(gate.gate),
        **history_field(desired.history),
        **autoscaling_fields(autoscale, observed, inputs.flips),
        **disaggregation.fields,
        **verified.fields,
        "conditions": dated(conditions, previous, generation=observed.generation, now=now),
        **kept_field([*desired.kept, *desired.leaving]),
    }
    patience = ReadinessDeadline(now, inputs.deadline)
    waits = (
        desired.drain.requeue_after_seconds,
        DRAIN_POLL_SECONDS if desired.is_flipping else None,
        desired.registered.requeue_after_seconds,
        verified.requeue_after_seconds,
        seconds_left(inputs.rollout, now),
        gate.requeue_after_seconds,
        next_loss(desired.serving, observed.workloads, patience),
        inputs.ending.next_seconds,
    )
    return StatusPlan(
        status,
        events=(
            *events(observed.status, status),
            *decision_events(observed.status, status),
            *overridden(autoscale, inputs.sizes, observed),
        ),
        requeue_after_seconds=min((each for each in waits if each is not None), default=None),
        verify=verified.due,
    )


def _step_text(step: str | None, gate: GateResult) -> str | None:
    is_shown = step is not None and gate.waits and gate.condition is None
    return f"{step}; at its gate: {gate.waits}" if is_shown else step


def _restarted(desired: DesiredState, gate: GateResult) -> Rollout | None:
    """The roll out; its clock starts again with the step that a gate lets begin."""
    rollout = desired.inputs.rollout
    if rollout is None or not gate.has_passed or rollout.since is None:
        return rollout
    return replace(rollout, since=desired.now, stalled=None)


def _step_of(desired: DesiredState) -> tuple[int, int] | tuple[()]:
    if desired.rolling is None:
        return ()
    return desired.rolling.step.number, desired.rolling.step.steps


def _inputs(desired: DesiredState, views: tuple[RoleView, ...]) -> StatusInputs:
    inputs = desired.inputs
    return StatusInputs(
        roles=views,
        observed=inputs.observed,
        existing=inputs.existing,
        target=inputs.target,
        current=inputs.current,
        declared_ingress=inputs.cluster.spec.ingress_role,
        waits_for=desired.step.waits_for,
        leaving=tuple(workload.id for workload in desired.leaving),
        draining=desired.drain.messages,
        stalled=None if inputs.rollout is None else inputs.rollout.stalled,
        deadline=inputs.deadline,
        is_rolled_back=inputs.is_rolled_back,
        changing=frozenset(
            view.name for view in views if view.name in inputs.replaced_roles and not view.is_ready
        ),
        lost=inputs.ending.stuck,
        step=None if desired.rolling is None else desired.rolling.message,
        at_zero=_at_zero(inputs),
    )


def _at_zero(inputs: PlanInputs) -> str | None:
    """Say what becomes of requests while no worker is asked for; None = some is."""
    if any(size.desired for size in inputs.sizes if size.role not in ENGINELESS):
        return None
    spec = inputs.cluster.spec
    seconds = spec.qos.admission.worker_wait_seconds
    if not any(size.desired for size in inputs.sizes if size.role == ROUTER):
        return "no worker is asked for: requests fail until a pool is scaled up"
    if not seconds:
        return (
            "no worker is asked for: routers refuse requests until a pool is scaled up, or hold "
            "them with qos.admission.workerWaitSeconds"
        )
    hold = f"routers hold requests for {seconds:g} s at most"
    if spec.may_sleep:
        return f"all workers sleep: {hold}, and one that they hold wakes the first workers"
    return f"no worker is asked for: {hold}, until a pool is scaled up"


def _disaggregation(
    desired: DesiredState, previous: Previous
) -> tuple[DisaggregationResult, Transfers]:
    """Reports of the workers and verified transfers; nothing of mixed workers."""
    inputs, serving = desired.inputs, desired.step.serving
    spec, observed = inputs.cluster.spec, inputs.observed
    if desired.serving_role == "mixed" or PREFILL not in spec.roles.present():
        return DisaggregationResult(), Transfers()
    records, workloads = observed.worker_records, inputs.existing.of_revision(serving)
    verified = of_gate(desired) or (serving, workloads)
    is_known = records is not None and records.error is None
    reports = reports_of(records, workloads) if records is not None and is_known else None
    settings = VerificationSettings(
        floor=spec.placement.min_transfer_gbps if spec.placement else None,
        request=observed.verify_request,
        now=desired.now,
        since=checked_since(desired),
    )
    ended, waits = observed.verifications.ended, observed.verifications.waits
    return (
        disaggregating(reports, previous, spec.prefill_length_threshold),
        transfers(Pairs.of(*verified), previous, ended, waits, settings),
    )


NOTHING_IS_REVERTED = (
    "what runs goes on, and drift of edited or deleted objects is not reverted until this is "
    "corrected"
)


def plan_invalid(faults: Sequence[Fault], observed: Observed, now: str) -> StatusPlan:
    """The status of an object that is refused: the last one, with present numbers and conditions,
    and every fault in Ready.
    """
    previous = Previous(observed.status)
    message = "; ".join([*(str(fault) for fault in faults), NOTHING_IS_REVERTED])
    ready = Condition.false(words.READY, words.INVALID_SPEC, message)
    existing, current = Workloads(observed), current_revision(observed)
    views = tuple(_known_views(previous, existing, current))
    facts = StatusInputs(
        roles=views,
        observed=replace(observed, key_fault=_key_fault(previous)),
        existing=existing,
        target=previous.text("revision"),
        current=current,
        declared_ingress="decode",
    )
    found = (ready, *_still_true(facts, previous), *progress_of(ready))
    status = {
        **observed.status,
        "observedGeneration": observed.generation,
        **(number_fields(views) if views else {}),
        "conditions": dated(found, previous, generation=observed.generation, now=now),
    }
    return StatusPlan(status, events(observed.status, status))


def _still_true(facts: StatusInputs, previous: Previous) -> Iterator[Condition]:
    """The conditions below Ready that were there before, as they are now.  Neither etcd nor the
    Secret of API keys is read, since which ones is unknown: their problems stay. Conditions beside
    the tree (AcceleratorsInUse, DiscoveryInSync, Disaggregating and the autoscaler's) are left out
    until the spec is right again.
    """
    for condition in condition_tree(facts)[1:]:
        before = previous.condition(condition.type)
        if condition.type == words.DISCOVERY_READY and before:
            yield Condition.kept(previous, condition.type) or condition
        elif condition.type == words.SERVING or (
            before and condition.type not in (words.STALLED, words.RECONCILING)
        ):
            yield condition


def _key_fault(previous: Previous) -> Problem | None:
    """Problem of the Secret of API keys: the only one of the ingress that needs a user."""
    ingress = previous.condition(words.INGRESS_READY)
    reason = str(ingress.get("reason", ""))
    needs_action = reason in words.NEEDS_ACTION
    return Problem(reason, str(ingress.get("message", ""))) if needs_action else None


def _known_views(
    previous: Previous, existing: Workloads, current: str | None
) -> Iterator[RoleView]:
    known = [
        (role, pool, gpu, desired)
        for (role, pool), (gpu, desired) in previous.pools().items()
        if role in words.ROLE_READY
    ]
    for role, pools in groupby(known, key=lambda entry: entry[0]):
        declared = []
        for _, pool, gpu, desired in pools:
            state = existing.of(role, pool, current)
            declared.append(DeclaredPool(pool, gpu, desired if state is None else state.desired))
        yield existing.view(role, declared, target=previous.text("revision"), serving=current)
