"""`pdctl plan`: what applying a file would do."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcluster_api.apiserver.observe import Live, observe
from pdcluster_api.apiserver.running_spec import as_it_runs
from pdcluster_api.errors import StartError
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import load_applied, parse_stored
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ENGINELESS
from pdcluster_schema.text import shortened
from pdctl.cli import plan_slo as slo_options
from pdctl.cli.bench_common import Plot
from pdctl.cli.live import KubeContext, read_live
from pdctl.cli.options import (
    Context,
    Kubeconfig,
    Namespace,
    fitting,
    load_file,
    load_files,
    named_namespace,
    refused,
    reported,
    required_file,
)
from pdctl.cli.plan_slo import SloOptions, plan_for_objective
from pdctl.cli.table import WIDTH, table
from pdctl.preview.differences import identity_faults, without_others
from pdctl.preview.preview import Effect, Preview, preview, preview_of_files
from pdctl.sizing.profiles import slo_fault

_MAX_VALUE = 24  # characters of a value in the table
_STRATEGIES = {
    "BlueGreen": "its workers come up beside the old ones, the Service switches when all of them "
    "are ready, then the old ones drain",
    "Rolling": "old workers are replaced step by step while both revisions serve, and drain stream "
    "by stream",
    "Recreate": "the old workers end first, and nothing answers until the new ones are ready",
}
_ROLE_STRATEGIES = {
    "BlueGreen": "new ones come up beside the old ones and serve with them; when all new ones are "
    "ready, the old ones drain",
    "Rolling": "step by step, while old and new ones serve together",
    "Recreate": "the old ones of that role end first",
}


def preview_of_cluster(new: PDCluster, live: Live | None) -> tuple[Preview, str | None]:
    """The preview, and a note where the existing object is not valid."""
    if live is None:
        return preview(new, None, None, _now()), None
    remark = None
    try:
        old = without_others(as_it_runs(parse_stored(live.body)[0], live), new)
    except InvalidObjectError as e:
        old, remark = (
            None,
            f"the object that is there is not valid ({e.faults[0]}), so its fields are not "
            "compared",
        )
    new = as_it_runs(new, live)
    state = DiscoveryState(managed=not new.spec.discovery.etcd.endpoints, ready=1, desired=1)
    return preview(new, old, observe(live, discovery=state, faults={}), _now()), remark


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def render_preview(cluster: PDCluster, found: Preview) -> str:
    title = f"{cluster.metadata.name} (namespace {cluster.metadata.namespace})"
    if found.before is None:
        blocks = [f"{title} would be made, with revision {found.after}."]
    elif not found.changes and not found.is_rollout:
        return f"{title}: nothing would change; revision {found.after}."
    else:
        number = len(found.changes)
        blocks = [f"{title}: {number} {'field' if number == 1 else 'fields'} would change."]
    return "\n\n".join([*blocks, *_blocks(found)])


def _blocks(found: Preview) -> Iterator[str]:
    if found.changes:
        rows = [
            (change.path, _value(change.before), _value(change.after), change.effect.value)
            for change in found.changes
        ]
        yield "\n".join(table(("FIELD", "NOW", "THEN", "TAKES EFFECT"), rows))
    if found.before is not None:
        yield textwrap.fill(_revision(found), WIDTH)
    yield _pools(found)
    if text := _scaling(found):
        yield text
    if found.steps:
        yield _steps(found)
    yield _accelerators(found)


def _value(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return shortened(text, _MAX_VALUE)


def _revision(found: Preview) -> str:
    if not found.is_rollout:
        is_policy = any(change.effect is Effect.POLICY for change in found.changes)
        policy = (
            " Policy reaches the workers in a minute or two, without a restart."
            if is_policy
            else ""
        )
        return f"No new revision: {found.after} stays, and {_replaced(found)}.{policy}"
    first = next((path for path in found.replaced.values() if path), "")
    why = f" The first field that replaces all of them is {first}." if first else ""
    return (
        f"A new revision follows: {found.after} replaces {found.before} by {found.strategy}: "
        f"{_STRATEGIES[found.strategy]}.{why}"
    )


def _replaced(found: Preview) -> str:
    """Roles that are replaced where the revision stays, why and how."""
    if not found.replaced:
        return "no worker is replaced"
    roles = " and ".join(
        f"{role} ({path})" if path else role for role, path in found.replaced.items()
    )
    computing = found.replaced.keys() - set(ENGINELESS)
    how = f", by {found.strategy}: {_ROLE_STRATEGIES[found.strategy]}" if computing else ""
    return f"workers of {roles} alone are replaced{how}"


def _pools(found: Preview) -> str:
    rows: list[Sequence[str]] = []
    for pool in found.pools:
        came = "comes" if pool.before is None else "goes" if pool.after is None else ""
        rows.append(
            (
                "/".join(pool.key),
                pool.gpu,
                _number(pool.before),
                _number(pool.after),
                pool.note or came,
            )
        )
    return "\n".join(table(("POOL", "GPU", "NOW", "THEN", "NOTE"), rows, right=(2, 3)))


def _scaling(found: Preview) -> str:
    """Owner of pool sizes from then on, and what limits the autoscaler; empty = no change."""
    before, after = found.mode
    if after == "On":
        text = (
            "autoscale.mode is On: THEN is what the autoscaler begins with, whatever the load is; "
            "from there it decides by metrics."
        )
    elif before == "On":
        text = (
            f"autoscale.mode was On and is {after}: pools keep their sizes until a scale request "
            "or their replicas change in the file."
        )
    elif after == "Advise":
        text = (
            "autoscale.mode is Advise: status.autoscaling shows what would be done, and nothing is."
        )
    else:
        return ""
    return "\n".join(
        textwrap.fill(line, WIDTH)
        for line in (text, *(f"{reason}: {message}" for reason, message in found.problems))
    )


def _accelerators(found: Preview) -> str:
    rows = [
        (each.gpu, str(each.now), str(each.meanwhile), str(each.after), str(each.extra))
        for each in found.accelerators
    ]
    lines = table(("ACCELERATOR", "NOW", "MEANWHILE", "AFTER", "EXTRA"), rows, right=(1, 2, 3, 4))
    short = [f"{each.extra} {each.gpu}" for each in found.accelerators if each.extra]
    is_replacing = found.is_rollout or not set(ENGINELESS).issuperset(found.replaced)
    if is_replacing and short:
        none = "strategy Recreate needs none beside the old"
        if found.strategy == "Rolling":
            none = "maxSurge 0 with maxUnavailable 1 needs none, and is a worker short on the way"
        text = f"Meanwhile {', '.join(short)} more must be free; rollout.{none}."
        lines += textwrap.wrap(text, WIDTH)
    return "\n".join(lines)


def _steps(found: Preview) -> str:
    """New and old workers after each change of sizes, and the most accelerators on the way."""
    roles = sorted({role for step in found.steps for role in (*step.new, *step.old)})
    rows = [
        (
            f"{step.number} of {step.steps}",
            *(f"{step.new.get(role, 0)} new, {step.old.get(role, 0)} old" for role in roles),
            ", ".join(f"{number} {gpu}" for gpu, number in sorted(step.accelerators.items())),
        )
        for step in found.steps
    ]
    lines = table(("STEP", *(role.upper() for role in roles), "AT MOST"), rows)
    if found.shortage:
        lines += textwrap.wrap(f"It stops there: {found.shortage}.", WIDTH)
    return "\n".join(lines)


def _number(workers: int | None) -> str:
    return "-" if workers is None else str(workers)


def plan_command(
    file: Annotated[
        list[Path] | None,
        required_file("a PDCluster that would be applied; may be given again; - = stdin"),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="compare with this file instead of the cluster's object"),
    ] = None,
    *,
    slo: Annotated[
        bool, typer.Option("--slo", help="plan a new cluster for an objective in place of a file")
    ] = False,
    model: slo_options.ModelName = None,
    gpu: slo_options.Gpus = None,
    input_tokens: slo_options.Input = None,
    output_tokens: slo_options.Output = None,
    ttft: slo_options.Ttft = None,
    itl: slo_options.Itl = None,
    percentile: slo_options.Percentile = None,
    price: slo_options.Price = None,
    trace: slo_options.Trace = None,
    rate_percentile: slo_options.RatePercentile = None,
    trace_block_tokens: slo_options.TraceBlockTokens = slo_options.BLOCK_TOKENS,
    engine: Annotated[slo_options.Engine, typer.Option(help="with --slo")] = "vllm",
    out: slo_options.Out = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --slo: the plan as JSON")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Say what applying a file would do, before it is applied: revision, accelerators, pools,
    what would be refused.  With --slo: which workers hold an objective, and their PDCluster.
    """
    options = SloOptions(
        *(model, gpu, input_tokens, output_tokens, ttft, itl, percentile, price),
        *(trace, rate_percentile, trace_block_tokens, engine, out, plot, as_json),
    )
    with reported(trace=trace or ""):
        if slo:
            if file or against:
                raise slo_fault("--slo: plans without a file; leave out -f and --against")
            plan_for_objective(options)
            return
        if given := list(options.given()):
            raise StartError(f"{given[0]}: is of --slo; give --slo, or leave it out", exit_code=2)
        if not file:
            raise StartError("give a PDCluster with -f, or an objective with --slo", exit_code=2)
    old = None if against is None else load_file(against)
    if old is not None and len(file) > 1:
        with reported():
            raise StartError("--against compares with one file; give one -f", exit_code=2)
    kube_context = KubeContext(kubeconfig, context, namespace)
    files = list(load_files(file, lambda each: fitting(load_applied(each), each)))
    ends = [_plan(each, new, old, kube_context) for each, new in files]
    if faulty := [end for end in ends if end is not None]:
        raise faulty[-1]


def _plan(
    file: Path, new: PDCluster, old: PDCluster | None, kube_context: KubeContext
) -> typer.Exit | None:
    """Print it; returns how the command ends where the API server would refuse it."""
    if old is None:
        with reported():
            new, found = _against_cluster(new, kube_context)
    else:
        if faults := identity_faults(old, new):
            raise refused(file, faults)
        found = preview_of_files(new, old, _now())
    typer.echo(render_preview(new, found))
    if not found.refused:
        return None
    typer.echo("The API server would refuse it, and nothing of this would happen:", err=True)
    return refused(file, found.refused)


def _against_cluster(new: PDCluster, kube_context: KubeContext) -> tuple[PDCluster, Preview]:
    """Preview against the cluster, with the namespace of the options, the file or the context."""
    named = named_namespace(new, kube_context.namespace)
    namespace = replace(kube_context, namespace=named).in_namespace()
    metadata = new.metadata.model_copy(update={"namespace": namespace})
    new = new.model_copy(update={"metadata": metadata})
    live = read_live(replace(kube_context, namespace=namespace), metadata.name)
    found, remark = preview_of_cluster(new, live)
    if remark is not None:
        typer.echo(f"note: {remark}", err=True)
    return new, found
