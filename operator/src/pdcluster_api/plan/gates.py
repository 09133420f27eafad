"""Gates of a rolling roll out: when its next step may begin, and when it goes back. Pure.

A step is at its gate when all its new workers are ready and serve:

    Waiting -> Baking    all workers of the step are ready, from then on for `bakeSeconds`
    Baking  -> Waiting   one is not ready any more; or the step has passed, and the next one begins
    Baking  -> Failed    a check failed: it stays there until a user resumes it
    any     -> RolledBack  it failed, or is undone: the workers before it come back, and the same
                         revision is not tried again

The memory is `status.gate`, written before a step that it allows: the plan follows the last status
alone.  Commands name the time, or the generation, that they are meant for: an old one does nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from pdcluster_api.plan.observed.pools import DeclaredRevision
from pdcluster_api.plan.observed.state import Attainment, Problem, RevisionLatency
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import at_revision, rollout_name
from pdcluster_schema.rollout import RolloutSpec
from pdcluster_schema.sections import PoolSpec, RoleSpec
from pdcluster_schema.workload import WorkloadId

FIELD = "gate"
WAITING: Final = "Waiting"
BAKING: Final = "Baking"
FAILED: Final = "Failed"
ROLLED_BACK: Final = "RolledBack"
PAUSE, RESUME, UNDO = "pause", "resume", "undo"
BY_USER: Final = "as was asked for by pdctl rollout undo"
_MOST_YEAR = 9000  # later times leave no room for what is added to them


@dataclass(frozen=True)
class RolloutCommand:
    """Value of the annotation `pdcluster.io/rollout`; one that cannot be read holds, too."""

    text: str = ""

    @property
    def _parts(self) -> list[str]:
        return self.text.split()

    @property
    def is_wrong(self) -> bool:
        known = {(PAUSE, 1), (RESUME, 2), (UNDO, 2)}
        return bool(self._parts) and (self._parts[0], len(self._parts)) not in known

    @property
    def holds(self) -> bool:
        return self._parts == [PAUSE] or self.is_wrong

    def resumes(self, since: str | None) -> bool:
        return since is not None and self._parts == [RESUME, since]

    def undoes(self, generation: int) -> bool:
        return self._parts == [UNDO, str(generation)]


@dataclass(frozen=True)
class Gate:
    revision: str  # of the roll out, the new one
    steps: int = 1
    passed: int = 0  # steps whose gate has passed
    state: Literal["Waiting", "Baking", "Failed", "RolledBack"] = "Waiting"
    since: str | None = None  # RFC 3339, when that began; None = it waits
    reason: str = ""  # of Failed and RolledBack
    message: str = ""
    to: str = ""  # the revision that it was rolled back to
    to_templates: Mapping[str, str] = field(default_factory=dict)  # by role

    @property
    def is_rolled_back(self) -> bool:
        return self.state == ROLLED_BACK

    @property
    def is_open(self) -> bool:
        """True while old workloads are kept to go back to."""
        return not self.is_rolled_back and self.passed < self.steps

    @property
    def is_held(self) -> bool:
        """True if its step has all its workers, so that it need not come forward."""
        return self.state in (BAKING, FAILED)


@dataclass(frozen=True)
class Check:
    """One fact that a gate asks for.  message: with its figures"""

    status: Literal["True", "False", "Unknown"]
    message: str


@dataclass(frozen=True)
class GateFacts:
    revision: str
    generation: int  # of the PDCluster
    steps: int
    finished: int  # steps that have all their new workers, ready and serving
    origin: DeclaredRevision | str  # to which it can go back, or why it cannot
    checks: tuple[Check, ...] = ()  # since the gate bakes
    stalled: str | None = None  # why it has not come forward for too long


_NAMES = {
    **{name: name for name in ("revision", "steps", "passed", "state", "since")},
    **{name: name for name in ("reason", "message", "to")},
    "toTemplates": "to_templates",
}
_GATE = TypeAdapter(Gate)


def read_gate(status: Mapping[str, Any]) -> Gate | None:
    """The gate that the last status speaks of; None = none, or nothing that can be read."""
    found = status.get(FIELD)
    if not isinstance(found, Mapping):
        return None
    try:
        gate = _GATE.validate_python(
            {field: found[name] for name, field in _NAMES.items() if name in found}
        )
        _time(gate.since or "1970-01-01T00:00:00Z")
        return gate
    except ValueError:
        return None


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.utcoffset() is None or found.year >= _MOST_YEAR:
        raise ValueError(f"{text} is no time of the status")
    return found


def gate_field(gate: Gate | None) -> dict[str, Any]:
    if gate is None:
        return {}
    found = {name: getattr(gate, field) for name, field in _NAMES.items()}
    return {FIELD: {name: each for name, each in found.items() if each or each == 0}}


def as_rolled_back(
    cluster: PDCluster, status: Mapping[str, Any], command: str, known: Collection[WorkloadId]
) -> PDCluster:
    """The cluster under the revision that its roll out went back to, while its spec is the one that
    was given up, no command asks for another try, and each role has a workload to keep.  A pool
    that came since then is left out; one that was renamed keeps the name that its workers have.

    known: workloads that there are, or can be made from their snapshot
    """
    gate = read_gate(status)
    if gate is None or not gate.is_rolled_back or gate.revision != rollout_name(cluster.spec):
        return cluster
    if RolloutCommand(command).resumes(gate.since):
        return cluster
    roles, left_out = dict[str, RoleSpec](), list[str]()
    for role, declared in cluster.spec.roles.computing().items():
        place = (cluster.metadata.name, role, gate.to, gate.to_templates.get(role, ""))
        names = {
            each.pool
            for each in known
            if (each.cluster, each.role, each.revision, each.template) == place
        }
        if not names:
            return cluster
        roles[role], without = _with_pools(declared, names)
        left_out += [f"{role} pool {name}" for name in without]
    spec = cluster.spec.model_copy(update={"roles": cluster.spec.roles.model_copy(update=roles)})
    return at_revision(
        cluster.model_copy(update={"spec": spec}),
        *(gate.to, gate.to_templates),
        is_rolled_back=True,
        left_out=tuple(left_out),
    )


def _with_pools(role: RoleSpec, names: Collection[str]) -> tuple[RoleSpec, list[str]]:
    """The role with those pools, and the declared ones without workers.  One that is not known
    takes the name of one that is no longer declared.
    """
    renamed = iter(sorted(set(names) - {pool.name for pool in role.pools}))
    pools, without = list[PoolSpec](), list[str]()
    for pool in role.pools:
        name = pool.name if pool.name in names else next(renamed, None)
        if name is None:
            without.append(pool.name)
        else:
            pools.append(pool.model_copy(update={"name": name}))
    return role.model_copy(update={"pools": tuple(pools)}), without


def next_gate(
    before: Gate | None, facts: GateFacts, spec: RolloutSpec, command: RolloutCommand, now: str
) -> Gate | None:
    """The gate after a reconcile; None = nothing holds the roll out.  now: RFC 3339"""
    is_undone = command.undoes(facts.generation)
    if spec.on_failure is None and not command.holds and not is_undone:
        return None
    gate = _of_this_rollout(before, facts)
    if is_undone:
        return _went_back(gate, facts, words.UNDONE, BY_USER, now)
    if facts.stalled is not None and spec.on_failure == "Rollback":
        return _went_back(gate, facts, words.PROGRESS_DEADLINE_EXCEEDED, facts.stalled, now)
    if gate.state == FAILED:
        return _passed(gate) if command.resumes(gate.since) else gate
    if facts.finished <= gate.passed:
        return replace(gate, state="Waiting", since=None)
    return _baked(gate, facts, spec, command, now)


def _of_this_rollout(before: Gate | None, facts: GateFacts) -> Gate:
    """A new one begins with the step that is under way: what serves already has shown itself."""
    if before is None or before.revision != facts.revision or before.is_rolled_back:
        return Gate(facts.revision, facts.steps, min(facts.finished, facts.steps))
    if before.steps == facts.steps:
        return before
    is_past = before.passed >= before.steps
    passed = facts.steps if is_past else min(before.passed, facts.steps - 1)
    return replace(before, steps=facts.steps, passed=passed)


def _baked(
    gate: Gate, facts: GateFacts, spec: RolloutSpec, command: RolloutCommand, now: str
) -> Gate:
    if gate.since is None:
        return replace(gate, state="Baking", since=now)
    if command.resumes(gate.since):
        return _passed(gate)
    if _time(gate.since) > _time(now):  # the clock was set back: no fact is as new as that
        return replace(gate, since=now)
    failed = next((each for each in facts.checks if each.status == "False"), None)
    if failed is not None and spec.on_failure == "Rollback":
        return _went_back(gate, facts, words.GATE_FAILED, failed.message, now)
    if failed is not None and spec.on_failure is not None:
        message = failed.message
        return replace(gate, state="Failed", since=now, reason=words.GATE_FAILED, message=message)
    if spec.on_failure is None or command.holds or waits_for(gate, facts, spec, now):
        return gate
    return _passed(gate)


def waits_for(gate: Gate, facts: GateFacts, spec: RolloutSpec, now: str) -> str:
    """Return what a gate that bakes waits for, in words; empty = it passes."""
    if bake_seconds_left(gate, spec, now) is not None:
        return f"its workers have to stay ready until {bakes_until(gate, spec)}"
    unknown = (each.message for each in facts.checks if each.status == "Unknown")
    return "" if spec.when_unknown == "Continue" else next(unknown, "")


def is_unknown(gate: Gate | None, facts: GateFacts, spec: RolloutSpec, now: str) -> bool:
    """True if the time of a gate is over, and it waits for facts alone."""
    if gate is None or gate.state != BAKING or bake_seconds_left(gate, spec, now) is not None:
        return False
    return bool(waits_for(gate, facts, spec, now))


def bakes_until(gate: Gate, spec: RolloutSpec) -> str:
    """RFC 3339, as all times of the status."""
    ends = _time(gate.since or "") + timedelta(seconds=spec.bake_seconds or 0)
    return ends.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def bake_seconds_left(gate: Gate | None, spec: RolloutSpec, now: str) -> float | None:
    """None = nothing is due."""
    if gate is None or gate.state != BAKING or gate.since is None:
        return None
    # a clock that was set back must not hold it up
    age = abs((_time(now) - _time(gate.since)).total_seconds())
    left = (spec.bake_seconds or 0) - age
    return left if left > 0 else None


def _passed(gate: Gate) -> Gate:
    return Gate(gate.revision, gate.steps, gate.passed + 1)


def _went_back(gate: Gate, facts: GateFacts, reason: str, why: str, now: str) -> Gate:
    if isinstance(facts.origin, DeclaredRevision):
        return rolled_back(gate, facts.origin, reason, why, now)
    if gate.state == FAILED:
        return gate
    message = f"{why}; it cannot go back: {facts.origin}"
    return replace(gate, state="Failed", since=now, reason=reason, message=message)


def rolled_back(gate: Gate, to: DeclaredRevision, reason: str, why: str, now: str) -> Gate:
    return Gate(
        *(gate.revision, gate.steps, gate.passed, "RolledBack", now, reason, why, to.revision),
        to_templates=to.templates,
    )


LEAST_WORSE = 1.1  # how many times the old revision's a latency may be and still be no worse


def attainment_check(found: Attainment, least: int, revision: str, since: str) -> Check:
    """Fact that latencies hold their objectives, or are no worse than the old revision's.

    least: requests from which they count
    """
    if found.num_requests < least:
        text = f"revision {revision} has answered fewer than {least} requests since "
        counted = f"{found.counted_since}, when this operator began to count"
        return Check("Unknown", text + (counted if found.counted_since else since))
    judged = [(_latency_status(each), each) for each in found.latencies]
    for status in ("False", "Unknown"):
        wrong = next((each for one, each in judged if one == status), None)
        if wrong is not None:
            return Check(status, _latency_text(wrong, revision, found.num_requests))
    held = (f"{each.name} {_seconds(each.new)}" for each in found.latencies)
    return Check("True", f"{', '.join(held)} over {found.num_requests} requests")


def _latency_status(latency: RevisionLatency) -> Literal["True", "False", "Unknown"]:
    if latency.new is None:
        return "Unknown"
    if latency.new <= latency.objective:
        return "True"
    if latency.old is None:
        return "Unknown"
    return "True" if latency.new <= LEAST_WORSE * latency.old else "False"


def _latency_text(latency: RevisionLatency, revision: str, num_requests: int) -> str:
    if latency.new is None:
        return f"too few samples of {latency.name} of revision {revision}"
    compared = f"{_seconds(latency.old)} of the old one in the same time"
    if latency.old is None:
        compared = "the old one has too few requests in the same time to compare with"
    return (
        f"{latency.name} is {_seconds(latency.new)} of revision {revision} over {num_requests} "
        f"requests, {compared}; autoscale.objective is {latency.objective:g} s"
    )


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} s"


def gate_problem(
    gate: Gate | None, facts: GateFacts | None, spec: RolloutSpec, command: RolloutCommand, now: str
) -> Problem | None:
    """Problem of a roll out that waits for a user or for facts; None = it goes on, or back."""
    if gate is None or facts is None or gate.is_rolled_back:
        return None
    step = f"step {min(gate.passed + 1, gate.steps)} of {gate.steps} of revision {gate.revision}"
    resume = "`pdctl rollout resume` goes on all the same, `pdctl rollout undo` goes back"
    if gate.state == FAILED:
        return Problem(gate.reason, f"{step} failed its gate: {gate.message}; {resume}")
    if command.is_wrong:
        text = (
            f"{step} waits: annotation pdcluster.io/rollout is {command.text!r}, which is no "
            f"command: write pause, or remove it, or use pdctl rollout"
        )
        return Problem(words.PAUSED_BY_USER, text)
    if command.holds:
        return Problem(words.PAUSED_BY_USER, f"{step} is the last one until `pdctl rollout resume`")
    if is_unknown(gate, facts, spec, now):
        unknown = waits_for(gate, facts, spec, now)
        return Problem(words.GATE_UNKNOWN, f"{step} waits at its gate: {unknown}; {resume}")
    return None


def rolled_back_text(gate: Gate, left_out: Sequence[str] = ()) -> str:
    """left_out: declared pools without workers"""
    text = (
        f"revision {gate.revision} was rolled back to {gate.to}: {gate.message}; the spec stays as "
        "it is, and is not rolled out again until it changes: correct it, apply the previous file, "
        "or try the same again by `pdctl rollout resume`"
    )
    if not left_out:
        return text
    pools = " and ".join(left_out)
    return f"{text}; until then there is no worker of {pools}, which revision {gate.to} has not"
