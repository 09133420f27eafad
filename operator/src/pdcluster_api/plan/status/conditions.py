"""The condition tree: Ready <- DiscoveryReady, a condition per role, IngressReady; beside it
Serving, Reconciling, Stalled. Pure; messages hold nothing that changes by itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pdcluster_api.plan.observed.pools import RoleView, Workloads, node_lost
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
from pdcluster_schema.text import and_more
from pdcluster_schema.workload import WorkloadId


@dataclass(frozen=True)
class StatusInputs:
    roles: tuple[RoleView, ...]
    observed: Observed
    existing: Workloads
    target: str | None  # the declared revision
    current: str | None  # the revision that serves until this reconcile; None = none does
    declared_ingress: str  # the role that answers by the spec
    # rest of an older revision that must end first; None = nothing is waited for
    waits_for: OldPods | None = None
    # workloads of undeclared pools, which stay until the others of their role are ready
    leaving: tuple[WorkloadId, ...] = ()
    # pods that drain before a pool shrinks, or hold that up, by role
    draining: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # why the declared revision has not come forward for too long; None = it has
    stalled: str | None = None
    deadline: int = 0  # seconds for which it need not
    # its workers, or those of `changing` roles, are scaled to 0, as others answered at the deadline
    is_rolled_back: bool = False
    # roles of which new workers are to take the place of others of the same revision
    changing: frozenset[str] = frozenset()
    lost: Collection[str] = ()  # terminating pods of lost nodes, by name
    # why a roll out waits at a gate, or that it went back; None = it does not
    gate: Problem | None = None
    step: str | None = None  # of a rolling roll out, and what it waits for; None = it does not roll
    at_zero: str | None = None  # where no worker is asked for, what becomes of requests

    @property
    def is_rolling(self) -> bool:
        """True if older workers serve, or still have to go first."""
        replaces = self.is_replacing or bool(self.changing) or self.step is not None
        return self.waits_for is not None or replaces

    @property
    def is_replacing(self) -> bool:
        """True if the declared revision takes the place of another one."""
        return self.current not in (None, self.target)

    @property
    def new(self) -> str:
        """Workers that come, as text."""
        roles = " and ".join(sorted(self.changing))
        is_whole = self.is_replacing or not roles
        return f"revision {self.target}" if is_whole else f"{roles} of revision {self.target}"

    def is_given_up(self, role: str) -> bool:
        return self.is_rolled_back and (self.is_replacing or role in self.changing)

    @property
    def scaled_to_0(self) -> str:
        views = [view for view in self.roles if self.is_given_up(view.name)]
        states = [pool.target for view in views for pool in view.pools]
        has_pods = any(state is not None and state.num_pods for state in states)
        return "is being scaled to 0" if has_pods else "is scaled to 0"

    @cached_property
    def ingress_role(self) -> str:
        """The role that answers behind the Service."""
        observed = self.observed
        existing = self.existing.ingress_role(observed.service_revision)
        return observed.service_role or existing or self.declared_ingress

    @cached_property
    def num_answering(self) -> int:
        """Ready workers that the Service leads to."""
        observed = self.observed
        return self.existing.num_answering(observed.service_revision, observed.service_role)

    @property
    def answering(self) -> str:
        plural = "" if self.num_answering == 1 else "s"
        return f"{self.num_answering} ready {self.ingress_role} worker{plural}"

    @property
    def decoding_role(self) -> str:
        if self.ingress_role != ROUTER:
            return self.ingress_role
        behind = (view.name for view in self.roles if view.name in ("decode", "mixed"))
        return next(behind, ROUTER)

    @property
    def or_no_endpoint(self) -> str:
        if self.ingress_role != ROUTER:
            return ""
        return f", or no {self.decoding_role} worker behind routers is ready"

    @property
    def goes_on(self) -> str:
        """The revision that serves meanwhile, as text; empty if none does."""
        if not self.num_answering or not self.current:
            return ""
        if self.step is not None:
            return "the old workers that are left go on serving"
        if self.is_replacing:
            return f"revision {self.current} goes on serving"
        return "the workers before them go on serving"


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
        unknown = list(_unknown_engines(view, facts.observed))
        reason = words.UNKNOWN_ENGINE_VERSION if unknown else words.AS_DECLARED
        reason = words.SCALING if draining else reason
        return Condition.true(kind, reason, "; ".join([_numbers(view), *notes, *unknown]))
    problem = None
    if not facts.is_given_up(view.name):
        lost = node_lost(pod for pod in view.ending if pod.name in facts.lost)
        problem = worst_of([lost, worst_problem(view)])
    reason, message = problem or _in_progress(view, facts)
    return Condition.false(kind, reason, "; ".join([message, *_still_exists(view, facts), *notes]))


def _unknown_engines(view: RoleView, observed: Observed) -> Iterator[str]:
    """Name the first worker with a stock engine of another version than is known, or than its image
    says, and how many have one.
    """
    devices = observed.worker_records.devices if observed.worker_records else {}
    pods = [pod.name for pool in view.pools for pod in (pool.target.pods if pool.target else ())]
    noted = sorted(pod for pod in pods if pod in devices and devices[pod].engine_note)
    if noted:
        yield f"{noted[0]}{and_more(len(noted))}: {devices[noted[0]].engine_note}"


def _still_exists(view: RoleView, facts: StatusInputs) -> Iterator[str]:
    lost = () if facts.is_given_up(view.name) else facts.lost
    ending = sorted((pod for pod in view.ending if pod.name not in lost), key=lambda pod: pod.name)
    if ending:
        yield f"{ending[0]} is still ending{and_more(len(ending))}"
    for workload in facts.leaving:
        if workload.role == view.name and view.name not in facts.changing:
            yield f"pool {workload.pool}, which is no longer declared, stays until they are"


def _in_progress(view: RoleView, facts: StatusInputs) -> Problem:
    if facts.is_given_up(view.name):
        old = facts.current if facts.is_replacing else "the workers before them"
        became = f"{facts.new} {facts.scaled_to_0}, and {old} stay{'s' * facts.is_replacing}"
        return Problem(words.PROGRESS_DEADLINE_EXCEEDED, f"{_numbers(view)}; {became}")
    if facts.waits_for is not None and not any(pool.target for pool in view.pools):
        return Problem(words.ROLLING_OUT, waiting_for(facts.waits_for))
    message = "; ".join([_numbers(view), *still_loading(view)])
    if facts.is_rolling:
        return Problem(words.ROLLING_OUT, message)
    is_scaling = _is_scaling(view, Previous(facts.observed.status))
    return Problem(words.SCALING if is_scaling else words.STARTING, message)


def missing_parts(views: Sequence[RoleView], discovery: DiscoveryState) -> str:
    """Lack of unready workers: etcd, the worst of their problems, or only their number."""
    etcd_text = f"discovery: {discovery_condition(discovery).message}"
    etcd = () if discovery_answers(discovery) else (etcd_text,)
    unready = [view for view in views if not view.is_ready]
    found = [
        (rank(problem.reason), f"{view.name}: {problem.message}")
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
    kind, selected, role = words.INGRESS_READY, facts.observed.service_revision, facts.decoding_role
    if facts.observed.key_fault is not None:
        return Condition.false(kind, *facts.observed.key_fault)
    if selected is None:
        return Condition.false(kind, words.STARTING, "the Service is being made")
    if facts.num_answering:
        return Condition.true(kind, words.AS_DECLARED, f"the Service leads to {facts.answering}")
    if selected == facts.target and not any(
        view.desired for view in facts.roles if view.name == role
    ):
        message = f"the Service is there; no {role} worker is declared"
        return Condition.true(kind, words.AS_DECLARED, message)
    message = f"the Service leads to no ready {facts.ingress_role} worker{facts.or_no_endpoint}"
    return Condition.false(kind, words.NOT_ANSWERING, message)


def _serving(facts: StatusInputs) -> Condition:
    kind, serving, key_fault = (
        words.SERVING,
        facts.observed.service_revision,
        facts.observed.key_fault,
    )
    if not facts.num_answering and facts.at_zero is not None and _has_routers(facts):
        return Condition.false(kind, words.SCALED_TO_ZERO, facts.at_zero)
    if not facts.num_answering:
        message = (
            f"no {facts.ingress_role} worker behind the Service is ready{facts.or_no_endpoint}: "
            "requests are not answered"
        )
        return Condition.false(kind, words.NOT_ANSWERING, message)
    # Only the declared revision's workers ask for the keys of this Secret; one that cannot be read
    # may hold some.
    is_refused = key_fault is not None and key_fault.reason == words.CONFIGURATION_REFUSED
    if key_fault is not None and is_refused and serving == facts.target:
        return Condition.false(kind, *key_fault)
    of = "all revisions" if facts.observed.service_is_wide else f"revision {serving}"
    message = f"requests are answered by {facts.answering} of {of}"
    if facts.decoding_role != "mixed" and not facts.existing.has_prefill(serving):
        message += "; no prefill worker is ready, so they prefill themselves"
    return Condition.true(kind, words.ANSWERING, message)


def _has_routers(facts: StatusInputs) -> bool:
    """Return whether the Service leads to ready routers."""
    routers = (view.ready for view in facts.roles if view.name == ROUTER)
    return facts.ingress_role == ROUTER and any(routers)


def _ready(below: Sequence[Condition], facts: StatusInputs) -> Condition:
    kind = words.READY
    if facts.observed.failures:
        return Condition.false(kind, *_worst_failure(facts.observed.failures))
    if facts.stalled is not None:
        message = _stalled(facts, facts.stalled)
        return Condition.false(kind, words.PROGRESS_DEADLINE_EXCEEDED, message)
    if facts.gate is not None:
        is_back = facts.gate.reason == words.ROLLED_BACK
        step = f"; {facts.step}" if facts.step and is_back else ""
        return Condition.false(kind, facts.gate.reason, f"{facts.gate.message}{step}")
    # What serves during a roll out is about to go: that it does not answer is no reason why the new
    # revision is not there.
    follows = words.NOT_ANSWERING if facts.is_rolling else None
    bad = [each for each in below if not each.is_true and each.reason != follows]
    if bad:
        return Condition.false(kind, *_cause(min(bad, key=lambda each: rank(each.reason)), facts))
    if facts.is_rolling:
        waits = "its workers take over" if facts.waits_for is None else waiting_for(facts.waits_for)
        waits = facts.step or waits
        message = f"roll out to {facts.new}: {waits}"
        return Condition.false(kind, words.ROLLING_OUT, message)
    found = (f"{view.name} {view.num_target_ready}/{view.desired}" for view in facts.roles)
    numbers = ", ".join(found)
    if facts.at_zero is not None:
        return Condition.true(kind, words.SCALED_TO_ZERO, f"{numbers}; {facts.at_zero}")
    return Condition.true(kind, words.AS_DECLARED, numbers)


def _stalled(facts: StatusInputs, cause: str) -> str:
    what = (
        f"no more workers of {facts.new} have become ready within "
        f"rollout.progressDeadlineSeconds ({facts.deadline} s): {cause}"
    )
    if facts.is_rolled_back:
        serves = f" and {facts.goes_on}" if facts.goes_on else ""
        return (
            f"{what}; it {facts.scaled_to_0}{serves}; fix that, then change the spec, or "
            "rollout.progressDeadlineSeconds to try the same again, or apply the previous file"
        )
    if facts.step is not None:
        return (
            f"{what}; {facts.step}; {facts.goes_on or 'nothing else is scaled down'}: fix that, or "
            "apply the previous file, which brings its workers back step by step"
        )
    if facts.is_rolling and facts.waits_for is None:
        return (
            f"{what}; nothing is scaled down: no worker of revision {facts.current} answered "
            "requests then: fix that, change the spec, or let the old workers end first with "
            "rollout.strategy Recreate"
        )
    return f"{what}; nothing is scaled down: no other revision serves: fix that, or change the spec"


def _cause(worst: Condition, facts: StatusInputs) -> Problem:
    """The worst condition; in a rollout, that the old revision goes on."""
    message = f"{worst.type.removesuffix('Ready').lower()}: {worst.message}"
    if not facts.is_rolling:
        return Problem(worst.reason, message)
    serves = f"; {facts.goes_on}" if facts.goes_on else ""
    on_the_way = worst.reason in (words.STARTING, words.SCALING)
    if facts.step is not None:
        is_next = on_the_way or worst.reason == words.ROLLING_OUT
        message = facts.step if is_next else f"{facts.step}; {message}"
        serves = "" if is_next else serves
    return Problem(
        words.ROLLING_OUT if on_the_way else worst.reason,
        f"roll out to {facts.new}: {message}{serves}",
    )


def _worst_failure(failures: Sequence[WriteFailure]) -> Problem:
    first = min(
        failures, key=lambda each: (rank(each.reason), each.waits, each.object, each.message)
    )
    return Problem(first.reason, f"{first.object}: {first.message}{and_more(len(failures))}")
