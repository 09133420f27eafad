"""The gate of the roll out that a plan carries out: its facts, and what the status says. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdcluster_api.plan.cluster import DesiredState
from pdcluster_api.plan.gates import (
    BY_USER,
    Check,
    Gate,
    GateFacts,
    RolloutCommand,
    attainment_check,
    bake_seconds_left,
    gate_problem,
    is_unknown,
    next_gate,
    read_gate,
    rolled_back,
    rolled_back_text,
    waits_for,
)
from pdcluster_api.plan.history import way_back
from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.state import Attainment, Problem, WorkloadState
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.revision import is_rolled_back, pools_left_out

_NO_WORKERS = "no worker is asked for that could pass it"


@dataclass(frozen=True)
class GateResult:
    gate: Gate | None = None  # for the status; None = nothing holds a roll out
    condition: Condition | None = None  # RolloutPaused or RolledBack, which may be False
    requeue_after_seconds: float | None = None
    has_passed: bool = False  # the next step begins
    waits: str = ""  # what a step that has its workers waits for, in words

    @property
    def of_ready(self) -> Problem | None:
        if self.condition is None or not self.condition.is_true:
            return None
        return Problem(self.condition.type, self.condition.message)


def checked_since(desired: DesiredState) -> str:
    """Time from which facts count for the gate that bakes, RFC 3339; empty = none does."""
    gate = desired.inputs.gate
    if desired.rolling is None or gate is None or gate.state != "Baking":
        return ""
    return gate.since or ""


def of_gate(desired: DesiredState) -> tuple[str, Sequence[WorkloadState]] | None:
    """The new revision and its workers, where a gate asks whether KV moves between them.  Prefill
    workers of an earlier template are among them: which one of a pool answers is not chosen.
    """
    inputs = desired.inputs
    if desired.rolling is None or inputs.cluster.spec.rollout.on_failure is None:
        return None
    states = inputs.existing.of_revision(inputs.target)
    own = [each for each in states if inputs.declared.has(each.id) or each.id.role == PREFILL]
    return inputs.target, own


def gate_result(desired: DesiredState, check: Check | None) -> GateResult:
    inputs, now = desired.inputs, desired.now
    spec, command = inputs.cluster.spec.rollout, RolloutCommand(inputs.observed.rollout_command)
    written = read_gate(inputs.observed.status)
    if is_rolled_back(inputs.cluster.spec) and written is not None:
        text = rolled_back_text(written, pools_left_out(inputs.cluster.spec))
        return GateResult(written, Condition.true(words.ROLLED_BACK, written.reason, text))
    if desired.rolling is None:
        return _undone(desired) if command.undoes(inputs.observed.generation) else GateResult()
    facts = _facts(desired, check)
    gate = next_gate(inputs.gate, facts, spec, command, now)
    if gate is not None and gate.is_rolled_back:
        return _goes_back(gate)
    problem = gate_problem(gate, facts, spec, command, now)
    seconds = bake_seconds_left(gate, spec, now)
    if spec.min_requests is not None and is_unknown(gate, facts, spec, now):
        seconds = float(inputs.cluster.spec.autoscale.interval_seconds)  # the next round of scrapes
    is_baking = gate is not None and gate.state == "Baking"
    return GateResult(
        gate,
        problem and Condition.true(words.ROLLOUT_PAUSED, problem.reason, problem.message),
        0.0 if gate != inputs.gate else seconds,
        has_passed=inputs.gate is not None and (gate is None or gate.passed > inputs.gate.passed),
        waits=(
            waits_for(gate, facts, spec, now)
            if gate is not None and is_baking
            else _NO_WORKERS * (gate is not None and desired.rolling.is_asleep)
        ),
    )


def _undone(desired: DesiredState) -> GateResult:
    """Answer an undo while no worker is replaced step by step."""
    found = way_back(desired.inputs)
    if isinstance(found, str):
        text = (
            f"annotation pdcluster.io/rollout asks for an undo, and there is nothing to go back "
            f"to: {found}; apply the previous file, or remove the annotation"
        )
        return GateResult(condition=Condition.false(words.ROLLED_BACK, words.NO_HISTORY, text))
    gate = Gate(desired.inputs.rollout_name)
    return _goes_back(rolled_back(gate, found, words.UNDONE, BY_USER, desired.now))


def _goes_back(gate: Gate) -> GateResult:
    """The next reconcile does, by this status."""
    condition = Condition.true(words.ROLLED_BACK, gate.reason, rolled_back_text(gate))
    return GateResult(gate, condition, requeue_after_seconds=0.0)


def _attained(desired: DesiredState) -> Iterator[Check]:
    """Latencies, once the time of the gate is over: the first requests are slow."""
    inputs, spec = desired.inputs, desired.inputs.cluster.spec.rollout
    least, gate = spec.min_requests, inputs.gate
    if least is None or gate is None or gate.since is None or gate.state != "Baking":
        return
    if bake_seconds_left(gate, spec, desired.now) is not None:
        return
    if _prefills(desired, is_new=False) and not _prefills(desired, is_new=True):
        if not any(size.desired for size in inputs.sizes if size.role == PREFILL):
            return  # it is to have none: nothing to compare, and nothing to wait for
        text = f"revision {inputs.rollout_name} has no ready prefill worker, and the old one has"
        yield Check("Unknown", f"{text}, so their latencies are not compared")
    else:
        found = inputs.observed.attainment or Attainment()
        yield attainment_check(found, least, inputs.rollout_name, gate.since)


def _prefills(desired: DesiredState, *, is_new: bool) -> bool:
    """Return whether a prefill worker of the new revision, or of another one, is ready."""
    return any(
        state.ready
        for state in desired.inputs.observed.workloads
        if state.id.role == PREFILL and (state.id.revision == desired.inputs.target) == is_new
    )


def _moved(desired: DesiredState, check: Check | None) -> Iterator[Check]:
    """Yield whether KV moves: not known without a pair of ready workers, where there should be
    any.
    """
    inputs = desired.inputs
    roles = {size.role for size in inputs.sizes if size.desired}
    if check is not None:
        yield check
    elif checked_since(desired) and {PREFILL, "decode"} <= roles:
        text = f"revision {inputs.target} has no ready prefill worker with a ready decode worker"
        yield Check("Unknown", f"{words.KV_TRANSFER_VERIFIED}: {text}")


def _facts(desired: DesiredState, check: Check | None) -> GateFacts:
    inputs, rolling = desired.inputs, desired.rolling
    assert rolling is not None, "only a rolling roll out has gates"
    rollout = inputs.rollout
    return GateFacts(
        inputs.rollout_name,
        inputs.observed.generation,
        rolling.step.steps,
        0 if rolling.is_asleep else rolling.step.finished,
        way_back(inputs),
        checks=(*_moved(desired, check), *_attained(desired)),
        stalled=None if rollout is None or rollout.rolled_back else rollout.stalled,
    )
