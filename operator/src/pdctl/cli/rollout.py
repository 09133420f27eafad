"""`pdctl rollout`: what a roll out waits for, and commands to it.

The operator is asked by an annotation, so that the spec stays as its file has it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import typer

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.kinds import PDCLUSTER
from pdcluster_api.apiserver.observe import Live, observe
from pdcluster_api.apiserver.running_spec import as_it_runs
from pdcluster_api.errors import StartError
from pdcluster_api.plan.gates import (
    BAKING,
    FAILED,
    PAUSE,
    RESUME,
    UNDO,
    Gate,
    RolloutCommand,
    read_gate,
)
from pdcluster_api.plan.history import read_history, way_back
from pdcluster_api.plan.inputs import PlanInputs, plan_inputs
from pdcluster_api.plan.observed.state import DiscoveryState, Previous
from pdcluster_api.plan.rollout import FIELD
from pdcluster_schema import conditions as words
from pdcluster_schema import labels
from pdcluster_schema.load import parse_stored
from pdcluster_schema.workload import WorkloadId
from pdctl.cli.live import KubeContext, read_live, with_client
from pdctl.cli.options import Context, Kubeconfig, Namespace, reported
from pdctl.cli.table import table

app = typer.Typer(
    help="Show a roll out of a cluster in Kubernetes, hold it, go on with it, or take it back.",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="of the cluster", show_default=False)]

_COLUMNS = ("REVISION", "ROLE", "POOL", "WORKERS", "READY", "WHOLE SINCE", "STATE")


@dataclass(frozen=True)
class RolloutView:
    """One PDCluster, as far as commands to its roll out ask."""

    live: Live

    @property
    def body(self) -> Mapping[str, Any]:
        return self.live.body

    @cached_property
    def inputs(self) -> PlanInputs:
        cluster = as_it_runs(parse_stored(self.live.body)[0], self.live)
        unknown = DiscoveryState(managed=True)
        return plan_inputs(cluster, observe(self.live, discovery=unknown, faults={}))

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def status(self) -> Previous:
        return Previous(self.body.get("status") or {})

    @property
    def gate(self) -> Gate | None:
        return read_gate(self.body.get("status") or {})

    @property
    def command(self) -> RolloutCommand:
        annotations = self.body["metadata"].get("annotations") or {}
        return RolloutCommand(str(annotations.get(labels.ROLLOUT, "")))

    @property
    def is_rolling(self) -> bool:
        return "step" in self.status.mapping(FIELD)

    @property
    def is_rolled_back(self) -> bool:
        return self.gate is not None and self.gate.is_rolled_back

    def lines(self) -> Iterator[str]:
        """The state, what holds it, and why."""
        target, serving = self.status.text("revision"), self.status.text("servingRevision")
        found, gate = self.status.mapping(FIELD), self.gate
        if self.is_rolling:
            step = f"step {found['step']} of {found['steps']}"
            of = f"{serving} is replaced" if serving != target else "roles are replaced"
            yield f"{self.name}: {of}, revision {found.get('revision')} comes: {step}"
        elif self.is_rolled_back:
            yield f"{self.name}: revision {serving} serves, as it was rolled back to"
        else:
            yield f"{self.name}: no roll out is under way; revision {serving} serves"
        if gate is not None and not gate.is_rolled_back:
            since = f" since {gate.since}" if gate.since else ""
            yield f"gates: {gate.passed} of {gate.steps} have passed; {gate.state}{since}"
        for kind in (words.READY, words.ROLLOUT_PAUSED, words.ROLLED_BACK):
            if condition := self.status.condition(kind):
                yield f"{kind} {condition.get('status')} ({condition.get('reason')}): " + str(
                    condition.get("message")
                )

    def paused(self) -> str:
        """The annotation's value.  Raises StartError where it cannot be paused."""
        strategy = parse_stored(self.body)[0].spec.rollout_strategy
        if strategy != "Rolling":
            message = (
                f"rollout.strategy of {self.name} is {strategy}, and only Rolling has steps after "
                "which it can wait; set that"
            )
            raise StartError(message, exit_code=2)
        if self.command.holds and not self.command.is_wrong:
            raise StartError(f"{self.name} is paused already", exit_code=1)
        return PAUSE

    def resumed(self) -> str | None:
        """The annotation's value; None = it is to be removed.  Raises StartError where nothing
        waits.
        """
        gate, paused = self.gate, self.status.condition(words.ROLLOUT_PAUSED)
        is_unknown = paused.get("reason") == words.GATE_UNKNOWN
        if gate is not None and gate.since is not None:
            waits = gate.state == BAKING and is_unknown
            if gate.state == FAILED or gate.is_rolled_back or waits:
                return f"{RESUME} {gate.since}"
        if self.command.holds:
            return None
        message = (
            f"{self.name} is not paused: none of its roll outs waits for a user, and none was "
            "rolled back; `pdctl rollout status` shows what it waits for"
        )
        raise StartError(message, exit_code=1)

    def undone(self) -> str:
        """The annotation's value.  Raises StartError where there is nothing to go back to."""
        if self.gate is not None and self.gate.is_rolled_back:
            message = (
                f"{self.name} is rolled back already, to revision {self.gate.to}; snapshots of "
                "revisions before it are not kept: apply the file of one"
            )
            raise StartError(message, exit_code=1)
        generation = self.body["metadata"].get("generation")
        if generation != (self.body.get("status") or {}).get("observedGeneration"):
            message = (
                f"the operator has not seen the newest spec of {self.name} yet; try again, or see "
                "whether it runs"
            )
            raise StartError(message, exit_code=1)
        found = way_back(self.inputs)
        if isinstance(found, str):
            message = f"{self.name} has no history to go back to: {found}; apply the previous file"
            raise StartError(message, exit_code=1)
        return f"{UNDO} {generation}"

    def history_lines(self) -> list[str]:
        """A row for each StatefulSet, or snapshot of one, by revision."""
        observed, history = self.inputs.observed, read_history(self.inputs.observed.status)
        states = {state.id: state for state in observed.workloads if not state.gone}
        rows = []
        for each in sorted({*states, *observed.records, *observed.retired}):
            state = states.get(each)
            numbers = ("0", "0") if state is None else (str(state.desired), str(state.ready))
            revision = "-".join(filter(None, (each.revision, each.template)))
            since = next((one.since for one in history if one.revision.has(each)), "-")
            rows.append((revision, each.role, each.pool, *numbers, since, self._state(each)))
        lines = table(_COLUMNS, rows, right=(3, 4))
        gate = self.gate
        if gate is not None and gate.is_rolled_back:
            why = f"was rolled back at {gate.since}: {gate.message}"
            lines.append(f"revision {gate.revision} {why}")
        return lines

    def _state(self, workload: WorkloadId) -> str:
        inputs = self.inputs
        if workload in inputs.observed.retired:
            return "snapshot"
        is_under_way = inputs.current != inputs.target or bool(inputs.replaced)
        place = "new" if inputs.declared.has(workload) else "before it"
        serves = inputs.observed.service_is_wide or workload.revision == inputs.current
        return ", ".join([place] * is_under_way + ["serves"] * serves)


def _live(kube_context: KubeContext, name: str) -> Live:
    live = read_live(kube_context, name)
    if live is None:
        namespace = kube_context.in_namespace()
        message = f"there is no PDCluster {name} in namespace {namespace}; -n names another one"
        raise StartError(message, exit_code=2)
    return live


def _annotate(kube_context: KubeContext, name: str, value: str | None) -> None:
    namespace = kube_context.in_namespace()
    patch = {"metadata": {"annotations": {labels.ROLLOUT: value}}}

    async def annotate(client: ApiClient) -> None:
        await client.merge_patch(PDCLUSTER, namespace, name, patch)

    with_client(kube_context, annotate)


@app.command("status")
def status_command(
    name: Name,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show how far the roll out is, and what it waits for.

    Exit code 0 = it goes on, or none is under way; 1 = it waits for a user, or was rolled back.
    """
    with reported():
        view = RolloutView(_live(KubeContext(kubeconfig, context, namespace), name))
        typer.echo("\n".join(view.lines()))
    held = (words.ROLLOUT_PAUSED, words.ROLLED_BACK)
    if any(view.status.is_true(kind) for kind in held):
        raise typer.Exit(1)


@app.command("history")
def history_command(
    name: Name,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List the revisions that there are, that to which an undo goes back among them, and what was
    rolled back.

    WHOLE SINCE is the time when all workers of a revision were ready first.
    """
    with reported():
        view = RolloutView(_live(KubeContext(kubeconfig, context, namespace), name))
        typer.echo("\n".join(view.history_lines()))


@app.command("pause")
def pause_command(
    name: Name,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let the step that is under way be the last one, until `pdctl rollout resume`; of a later roll
    out the first.
    """
    kube_context = KubeContext(kubeconfig, context, namespace)
    with reported():
        view = RolloutView(_live(kube_context, name))
        _annotate(kube_context, name, view.paused())
    typer.echo(f"{name}: no step begins until `pdctl rollout resume {name}`")


@app.command("resume")
def resume_command(
    name: Name,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Go on: after a pause, past the gate at which the roll out waits, or once more with a revision
    that was rolled back.
    """
    kube_context = KubeContext(kubeconfig, context, namespace)
    with reported():
        view = RolloutView(_live(kube_context, name))
        _annotate(kube_context, name, view.resumed())
    typer.echo(f"{name}: the roll out goes on")


@app.command("undo")
def undo_command(
    name: Name,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Go back to the revision before, in the middle of a roll out or after its end: its workers
    come back by rollout.strategy, the spec stays as it is, and is not rolled out again until it
    changes or `pdctl rollout resume`.
    """
    kube_context = KubeContext(kubeconfig, context, namespace)
    with reported():
        view = RolloutView(_live(kube_context, name))
        _annotate(kube_context, name, view.undone())
    typer.echo(f"{name}: goes back to revision {way_back(view.inputs)}; the spec stays as it is")
