"""The status of an object that is refused: what runs goes on, and so do its conditions. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from pdcluster_api.plan.observed.pools import DeclaredPool, RoleView, Workloads
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import Observed, Problem
from pdcluster_api.plan.result import StatusPlan
from pdcluster_api.plan.rollout.steps import current_revision
from pdcluster_api.plan.status.condition import Condition, dated, number_fields
from pdcluster_api.plan.status.conditions import StatusInputs, condition_tree, progress_of
from pdcluster_api.plan.status.events import events
from pdcluster_schema import conditions as words
from pdcluster_schema.errors import Fault

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
