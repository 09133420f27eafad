"""The condition tree: Ready <- DiscoveryReady, a condition per role, IngressReady; beside it
Serving, Reconciling, Stalled. Pure; messages hold nothing that changes by itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdcluster_api.plan.observed.pools import RoleView, node_lost
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Observed,
    Previous,
    Problem,
    WriteFailure,
)
from pdcluster_api.plan.rollout import OldPods
from pdcluster_api.plan.status.condition import (
    Condition,
    rank,
    still_loading,
    worst_of,
    worst_problem,
)
from pdcluster_api.plan.status.discovery import discovery_answers, discovery_condition
from pdcluster_schema import conditions as words
from pdcluster_schema.sections import ROUTER
from pdcluster_schema.workload import WorkloadId


@dataclass(frozen=True)
class StatusInputs:
    """Inputs of the conditions."""

    roles: tuple[RoleView, ...]
    observed: Observed
    previous: Previous
    target: str | None  # the declared revision
    current: str | None  # the revision that serves until this reconcile; None = none does
    # rest of an older revision that must end first; None = nothing is waited for
    waits_for: OldPods | None
    ingress_role: str  # the role that answers behind the Service
    num_answering: int  # ready workers that the Service leads to
    has_prefill: bool  # whether a prefill worker is ready beside them
    # workloads of undeclared pools, which stay until the others of their role are ready
    leaving: tuple[WorkloadId, ...] = ()
    # pods that drain before a pool shrinks, or hold that up, by role
    draining: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # why the declared revision has not come forward for too long; None = it has
    stalled: str | None = None
    deadline: int = 0  # seconds for which it need not
    # its workers are scaled to 0, as another revision answered at the deadline
    is_rolled_back: bool = False
    lost: Collection[str] = ()  # terminating pods of lost nodes, by name

    @property
    def is_rolling(self) -> bool:
        """True if an older revision serves, or still has to go first."""
        return self.waits_for is not None or self.current not in (None, self.target)

    @property
    def scaled_to_0(self) -> str:
        states = [pool.target for view in self.roles for pool in view.pools]
        has_pods = any(state is not None and state.num_pods for state in states)
        return "is being scaled to 0" if has_pods else "is scaled to 0"


def condition_tree(facts: StatusInputs) -> tuple[Condition, ...]:
    below = (
        discovery_condition(facts.observed.discovery, facts.lost),
        *(_role(view, facts) for view in facts.roles),
        _ingress(facts),
    )
    ready = _ready(below, facts)
    return (ready, _serving(facts), *below, *progress_of(ready))


def progress_of(ready: Condition) -> tuple[Condition, ...]:
    """Reconciling or Stalled, until all is as declared: never both, as kstatus takes the first."""
    if ready.is_true:
        return ()
    kind = words.STALLED if ready.reason in words.NEEDS_ACTION else words.RECONCILING
    return (Condition.true(kind, ready.reason, ready.message),)


def _role(view: RoleView, facts: StatusInputs) -> Condition:
    kind = words.ROLE_READY[view.name]
    draining = facts.draining.get(view.name, ())
    notes = [*draining, *(pool.declared.note for pool in view.pools if pool.declared.note)]
    if view.is_ready:  # with workers that are too many: they serve, or finish what they have
        reason = words.SCALING if draining else words.AS_DECLARED
        return Condition.true(kind, reason, "; ".join([_numbers(view), *notes]))
    problem = None if facts.is_rolled_back else _problem(view, facts)
    reason, message = problem or _in_progress(view, facts)
    return Condition.false(kind, reason, "; ".join([message, *_still_exists(view, facts), *notes]))


def _problem(view: RoleView, facts: StatusInputs) -> Problem | None:
    """The worst problem of a role's pods: of those that are not ready, or do not end."""
    lost = node_lost(pod.ending for pod in view.ending if pod.name in facts.lost)
    return worst_of(each for each in (lost, worst_problem(view)) if each is not None)


def _still_exists(view: RoleView, facts: StatusInputs) -> Iterator[str]:
    lost = () if facts.is_rolled_back else facts.lost
    ending = sorted((pod for pod in view.ending if pod.name not in lost), key=lambda pod: pod.name)
    if ending:
        yield f"{ending[0]} is still ending" + (
            f" (and {len(ending) - 1} more)" if len(ending) > 1 else ""
        )
    for workload in facts.leaving:
        if workload.role == view.name:
            yield f"pool {workload.pool}, which is no longer declared, stays until they are"


def _in_progress(view: RoleView, facts: StatusInputs) -> Problem:
    if facts.is_rolled_back:
        became = f"revision {facts.target} {facts.scaled_to_0}, and {facts.current} stays"
        return Problem(words.PROGRESS_DEADLINE_EXCEEDED, f"{_numbers(view)}; {became}")
    if facts.waits_for is not None and not any(pool.target for pool in view.pools):
        return Problem(words.ROLLING_OUT, waiting_for(facts.waits_for))
    message = "; ".join([_numbers(view), *still_loading(view)])
    if facts.is_rolling:
        return Problem(words.ROLLING_OUT, message)
    return Problem(words.SCALING if _is_scaling(view, facts.previous) else words.STARTING, message)


def missing_parts(views: Sequence[RoleView], discovery: DiscoveryState) -> str:
    """Lack of unready workers: etcd, the worst of their problems, or only their number."""
    etcd_text = f"discovery: {discovery_condition(discovery).message}"
    etcd = () if discovery_answers(discovery) else (etcd_text,)
    unready = [view for view in views if not view.is_ready]
    found = [
        (rank(problem[0]), f"{view.name}: {problem[1]}")
        for view in unready
        if (problem := worst_problem(view))
    ]
    others = [min(found)[1]] if found else [f"{view.name}: {_numbers(view)}" for view in unready]
    return "; ".join([*etcd, *others])


def waiting_for(left: OldPods) -> str:
    """Objects that have to end before the declared revision is made."""
    first = f", first {left.first}" if left.first else ""
    return f"the old revision has to end first; {left.num_pods} of its pods are left{first}"


def _is_scaling(view: RoleView, previous: Previous) -> bool:
    """Return whether a pool got another size, now or before, and has not been ready since."""
    before = previous.pools()
    changed = any(
        before.get((view.name, pool.declared.name), ("", pool.desired))[1] != pool.desired
        for pool in view.pools
    )
    return changed or previous.reason(words.ROLE_READY[view.name]) == words.SCALING


def _numbers(view: RoleView) -> str:
    text = f"{view.num_target_ready} of {view.desired} workers are ready"
    if len(view.pools) == 1:
        return text
    pools = (f"{pool.declared.name} {pool.num_target_ready}/{pool.desired}" for pool in view.pools)
    return f"{text} ({', '.join(pools)})"


def _ingress(facts: StatusInputs) -> Condition:
    if facts.observed.key_fault is not None:
        reason, message = facts.observed.key_fault
        return Condition.false(words.INGRESS_READY, reason, message)
    selected = facts.observed.service_revision
    if selected is None:
        return Condition.false(words.INGRESS_READY, words.STARTING, "the Service is being made")
    if facts.num_answering:
        message = f"the Service leads to {_workers(facts)}"
        return Condition.true(words.INGRESS_READY, words.AS_DECLARED, message)
    if selected == facts.target and not _num_declared(facts):
        message = f"the Service is there; no {_decoding(facts)} worker is declared"
        return Condition.true(words.INGRESS_READY, words.AS_DECLARED, message)
    message = f"the Service leads to no ready {facts.ingress_role} worker{_or_no_endpoint(facts)}"
    return Condition.false(words.INGRESS_READY, words.NOT_ANSWERING, message)


def _workers(facts: StatusInputs) -> str:
    return (
        f"{facts.num_answering} ready {facts.ingress_role} "
        f"worker{'' if facts.num_answering == 1 else 's'}"
    )


def _num_declared(facts: StatusInputs) -> int:
    return sum(view.desired for view in facts.roles if view.name == _decoding(facts))


def _decoding(facts: StatusInputs) -> str:
    behind = next(
        (view.name for view in facts.roles if view.name in ("decode", "mixed")), facts.ingress_role
    )
    return behind if facts.ingress_role == ROUTER else facts.ingress_role


def _or_no_endpoint(facts: StatusInputs) -> str:
    return (
        f", or no {_decoding(facts)} worker behind routers is ready"
        if facts.ingress_role == ROUTER
        else ""
    )


def _serving(facts: StatusInputs) -> Condition:
    if not facts.num_answering:
        message = (
            f"no {facts.ingress_role} worker behind the Service is ready{_or_no_endpoint(facts)}: "
            "requests are not answered"
        )
        return Condition.false(words.SERVING, words.NOT_ANSWERING, message)
    key_fault = facts.observed.key_fault
    # Only the declared revision's workers ask for the keys of this Secret; one that cannot be read
    # may hold some.
    if (
        key_fault is not None
        and key_fault[0] == words.CONFIGURATION_REFUSED
        and facts.observed.service_revision == facts.target
    ):
        return Condition.false(words.SERVING, key_fault[0], key_fault[1])
    alone = (
        ""
        if facts.has_prefill or _decoding(facts) == "mixed"
        else "; no prefill worker is ready, so they prefill themselves"
    )
    message = (
        f"requests are answered by {_workers(facts)} of revision "
        f"{facts.observed.service_revision}{alone}"
    )
    return Condition.true(words.SERVING, words.ANSWERING, message)


def _ready(below: Sequence[Condition], facts: StatusInputs) -> Condition:
    if facts.observed.failures:
        reason, message = _worst_failure(facts.observed.failures)
        return Condition.false(words.READY, reason, message)
    if facts.stalled is not None:
        message = _stalled(facts, facts.stalled)
        return Condition.false(words.READY, words.PROGRESS_DEADLINE_EXCEEDED, message)
    # What serves during a roll out is about to go: that it does not answer is no reason why the new
    # revision is not there.
    follows = words.NOT_ANSWERING if facts.is_rolling else None
    bad = [
        condition for condition in below if not condition.is_true and condition.reason != follows
    ]
    if bad:
        reason, message = _cause(min(bad, key=lambda condition: rank(condition.reason)), facts)
        return Condition.false(words.READY, reason, message)
    if facts.is_rolling:
        waits = "its workers take over" if facts.waits_for is None else waiting_for(facts.waits_for)
        message = f"roll out to revision {facts.target}: {waits}"
        return Condition.false(words.READY, words.ROLLING_OUT, message)
    message = ", ".join(
        f"{view.name} {view.num_target_ready}/{view.desired}" for view in facts.roles
    )
    return Condition.true(words.READY, words.AS_DECLARED, message)


def _stalled(facts: StatusInputs, cause: str) -> str:
    what = (
        f"no more workers of revision {facts.target} have become ready within "
        f"rollout.progressDeadlineSeconds ({facts.deadline} s)"
    )
    if not facts.is_rolled_back:
        return f"{what}: {cause}; nothing is scaled down: {_no_fallback(facts)}"
    serves = f" and revision {facts.current} goes on serving" if facts.num_answering else ""
    fix = (
        "fix that, then change the spec, or rollout.progressDeadlineSeconds to try the same again, "
        "or apply the previous file"
    )
    return f"{what}: {cause}; it {facts.scaled_to_0}{serves}; {fix}"


def _no_fallback(facts: StatusInputs) -> str:
    if facts.is_rolling and facts.waits_for is None:
        first = "let the old workers end first with rollout.strategy Recreate"
        fix = f"fix that, change the spec, or {first}"
        return f"no worker of revision {facts.current} answered requests then: {fix}"
    return "no other revision serves: fix that, or change the spec"


def _cause(worst: Condition, facts: StatusInputs) -> Problem:
    """The worst condition; in a rollout, that the old revision goes on."""
    message = f"{worst.type.removesuffix('Ready').lower()}: {worst.message}"
    if not facts.is_rolling:
        return Problem(worst.reason, message)
    serves = (
        f"; revision {facts.current} goes on serving"
        if facts.num_answering and facts.current
        else ""
    )
    on_the_way = worst.reason in (words.STARTING, words.SCALING)
    return Problem(
        words.ROLLING_OUT if on_the_way else worst.reason,
        f"roll out to revision {facts.target}: {message}{serves}",
    )


def _worst_failure(failures: Sequence[WriteFailure]) -> Problem:
    first = min(
        failures, key=lambda each: (rank(each.reason), each.waits, each.object, each.message)
    )
    others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return Problem(first.reason, f"{first.object}: {first.message}{others}")
