"""The status of one cluster, and the events of its changes.  Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from pdcluster_api.plan.cluster import DesiredState
from pdcluster_api.plan.drain.disruption import ReadinessDeadline, next_loss
from pdcluster_api.plan.observed.pools import PREFILL, DeclaredPool, RoleView, Workloads
from pdcluster_api.plan.observed.state import Observed, Previous, Problem
from pdcluster_api.plan.result import StatusPlan
from pdcluster_api.plan.rollout import current_revision, rollout_field, seconds_left
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
from pdcluster_api.plan.status.transfers import Pairs, Transfers, VerificationSettings, transfers
from pdcluster_schema import conditions as words
from pdcluster_schema.errors import Fault


def plan_status(desired: DesiredState) -> StatusPlan:
    inputs, step, now = desired.inputs, desired.step, desired.now
    observed, autoscale = inputs.observed, inputs.cluster.spec.autoscale
    previous, views = Previous(observed.status), tuple(inputs.views())
    disaggregation, verified = _disaggregating(desired), _transfers(desired)
    found: tuple[Condition | None, ...] = (
        *condition_tree(_inputs(desired, views)),
        desired.registered.condition,
        accelerators_in_use(inputs.cluster, views, observed.worker_records, previous),
        disaggregation.condition,
        verified.condition,
        desired.over_budget,
        *autoscale_conditions(autoscale, observed),
    )
    conditions = [each for each in found if each is not None]
    status = {
        "observedGeneration": observed.generation,
        **identity_fields(inputs.cluster, revision=inputs.target, serving=step.serving),
        **number_fields(views),
        **rollout_field(inputs.rollout),
        **autoscaling_fields(autoscale, observed),
        **disaggregation.fields,
        **verified.fields,
        "conditions": dated(conditions, previous, generation=observed.generation, now=now),
        **kept_field([*desired.kept, *desired.leaving]),
    }
    patience = ReadinessDeadline(now, inputs.deadline)
    waits = (
        desired.drain.requeue_after_seconds,
        desired.registered.requeue_after_seconds,
        verified.requeue_after_seconds,
        seconds_left(inputs.rollout, now),
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


def _inputs(desired: DesiredState, views: tuple[RoleView, ...]) -> StatusInputs:
    inputs, observed = desired.inputs, desired.inputs.observed
    return StatusInputs(
        roles=views,
        observed=observed,
        previous=Previous(observed.status),
        target=inputs.target,
        current=inputs.current,
        waits_for=desired.step.waits_for,
        leaving=tuple(workload.id for workload in desired.leaving),
        draining=desired.drain.messages,
        stalled=None if inputs.rollout is None else inputs.rollout.stalled,
        deadline=inputs.deadline,
        is_rolled_back=inputs.is_rolled_back,
        ingress_role=observed.service_role
        or inputs.existing.ingress_role(observed.service_revision)
        or inputs.cluster.spec.ingress_role,
        num_answering=inputs.existing.num_answering(
            observed.service_revision, observed.service_role
        ),
        has_prefill=inputs.existing.has_prefill(observed.service_revision),
        lost=inputs.ending.lost,
    )


def _is_disaggregated(desired: DesiredState) -> bool:
    """False for mixed workers."""
    roles = desired.inputs.cluster.spec.roles.present()
    return desired.serving_role != "mixed" and PREFILL in roles


def _disaggregating(desired: DesiredState) -> DisaggregationResult:
    if not _is_disaggregated(desired):
        return DisaggregationResult()
    inputs, records = desired.inputs, desired.inputs.observed.worker_records
    reports = None
    if records is not None and records.error is None:
        reports = reports_of(records, inputs.existing.of_revision(desired.step.serving))
    threshold = inputs.cluster.spec.prefill_length_threshold
    return disaggregating(reports, Previous(inputs.observed.status), threshold)


def _transfers(desired: DesiredState) -> Transfers:
    if not _is_disaggregated(desired):
        return Transfers()
    inputs, serving = desired.inputs, desired.step.serving
    observed, placement = inputs.observed, inputs.cluster.spec.placement
    return transfers(
        Pairs.of(serving, inputs.existing.of_revision(serving)),
        Previous(observed.status),
        observed.verifications.ended,
        observed.verifications.waits,
        VerificationSettings(
            floor=placement.min_transfer_gbps if placement else None,
            request=observed.verify_request,
            now=desired.now,
        ),
    )


NOTHING_IS_REVERTED = (
    "what runs goes on, and drift of edited or deleted objects is not reverted until this is "
    "corrected"
)


def plan_invalid(faults: Sequence[Fault], observed: Observed, now: str) -> StatusPlan:
    """The last status, with present numbers and conditions, and every fault in Ready."""
    previous = Previous(observed.status)
    message = "; ".join([*(str(fault) for fault in faults), NOTHING_IS_REVERTED])
    ready = Condition.false(words.READY, words.INVALID_SPEC, message)
    existing = Workloads(observed)
    views = tuple(_views(previous, existing, current_revision(observed)))
    found = (ready, *_still_true(previous, observed, existing, views), *progress_of(ready))
    status = {
        **observed.status,
        "observedGeneration": observed.generation,
        **(number_fields(views) if views else {}),
        "conditions": dated(found, previous, generation=observed.generation, now=now),
    }
    return StatusPlan(status, events(observed.status, status))


def _still_true(
    previous: Previous, observed: Observed, existing: Workloads, views: tuple[RoleView, ...]
) -> Iterator[Condition]:
    """The conditions below Ready that were there before, as they are now.  Neither etcd nor the
    Secret of API keys is read, since which ones is unknown: their problems stay. Conditions beside
    the tree (AcceleratorsInUse, DiscoveryInSync, Disaggregating and the autoscaler's) are left out
    until the spec is right again.
    """
    facts = StatusInputs(
        roles=views,
        observed=replace(observed, key_fault=_key_fault(previous)),
        previous=previous,
        target=previous.text("revision"),
        current=current_revision(observed),
        waits_for=None,
        ingress_role=observed.service_role
        or existing.ingress_role(observed.service_revision)
        or "decode",
        num_answering=existing.num_answering(observed.service_revision, observed.service_role),
        has_prefill=existing.has_prefill(observed.service_revision),
    )
    for condition in condition_tree(facts)[1:]:
        before = previous.condition(condition.type)
        if condition.type == words.DISCOVERY_READY and before:
            yield _again(before)
        elif condition.type == words.SERVING or (
            before and condition.type not in (words.STALLED, words.RECONCILING)
        ):
            yield condition


def _key_fault(previous: Previous) -> Problem | None:
    """Problem of the Secret of API keys: the only one of the ingress that needs a user."""
    ingress = previous.condition(words.INGRESS_READY)
    reason = str(ingress.get("reason", ""))
    return (
        Problem(reason, str(ingress.get("message", ""))) if reason in words.NEEDS_ACTION else None
    )


def _again(before: Mapping[str, object]) -> Condition:
    return Condition(
        str(before["type"]),
        before.get("status") == "True",
        str(before.get("reason", "")),
        str(before.get("message", "")),
    )


def _views(previous: Previous, existing: Workloads, current: str | None) -> Iterator[RoleView]:
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
