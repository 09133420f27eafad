"""`pdctl why`: the present state and the autoscaler's decisions, from metrics to replicas."""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from pdcluster_api.errors import StartError
from pdcluster_api.plan.autoscale.explain import (
    COLUMNS,
    MAX_DECISIONS,
    explained,
    read_record,
    summary,
)
from pdcluster_api.plan.observed.state import ScalingDecision
from pdctl.cli.completion import Cluster
from pdctl.cli.live import KubeContext, read_object
from pdctl.cli.options import Context, Kubeconfig, Namespace, StateDir, read_text, reported
from pdctl.cli.present import present_lines
from pdctl.cli.status import find_local_run
from pdctl.cli.table import table
from pdctl.cli.traces import TraceQuery, render_request
from pdctl.local.run_directory import default_state_dir
from pdctl.local.up import check_key

Body = Mapping[str, Any]


class _TextTimes(yaml.SafeLoader):
    """SafeLoader that keeps timestamps as text."""


_TextTimes.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def object_of_cluster(kube_context: KubeContext, name: str) -> Body:
    """Raises StartError when there is none."""
    body = read_object(kube_context, name)
    if body is None:
        namespace = kube_context.in_namespace()
        message = (
            f"no PDCluster {name} in namespace {namespace}; `kubectl get pdc -A` lists all, -n "
            "names another namespace"
        )
        raise StartError(message, exit_code=1)
    return body


def object_of_file(path: Path, name: str | None) -> Body:
    """A PDCluster, or its status alone.  Raises StartError (exit code 2)."""
    try:
        found = yaml.load(read_text(path), _TextTimes)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise StartError(
            f"{path}: not YAML: {e}; write it by `kubectl get pdc NAME -o yaml`", exit_code=2
        ) from e
    if not isinstance(found, dict) or not ({"status", "autoscaling", "spec"} & set(found)):
        raise StartError(
            f"{path}: is no PDCluster and no status of one; write it by `kubectl get pdc NAME -o "
            "yaml`",
            exit_code=2,
        )
    body = found if {"status", "spec"} & set(found) else {"status": found}
    metadata = body.get("metadata")
    is_called = metadata.get("name") if isinstance(metadata, dict) else None
    if name is not None and is_called not in (None, name):
        raise StartError(
            f"{path}: holds {is_called}, not {name}; leave the name out, or give its file",
            exit_code=2,
        )
    return body


def render_why(body: Body, last: int, now: datetime) -> str:
    """Raises StartError where there is no decision, with the reason.  now: for schedules."""
    written = _section(body, "status", "autoscaling")
    mode = _section(body, "spec", "autoscale").get("mode") or written.get("mode")
    decisions = list(_decisions(written))
    name = str(_section(body, "metadata").get("name", "this cluster"))
    if not decisions:
        raise StartError(
            "\n".join([_nothing(name, mode), *present_lines(body, (), now)]), exit_code=1
        )
    present = present_lines(body, [record for record, _ in decisions], now)
    blocks = ["\n".join(record_lines(name, manner, record)) for record, manner in decisions[:last]]
    more = len(decisions) - last
    hint = (
        [f"{more} earlier {'decision' if more == 1 else 'decisions'}: --last {len(decisions)}"]
        if more > 0
        else []
    )
    return "\n\n".join(
        [
            *(["\n".join([f"{name}, autoscale.mode {mode}", *present])] if present else []),
            *blocks,
            *hint,
        ]
    )


def render_why_local(state: Mapping[str, Any]) -> str:
    sizes = Counter((worker["role"], worker["pool"]) for worker in state["workers"])
    return "\n".join(
        [
            f"{state['name']} runs on this machine (process {state['pid']}): its pools have the "
            "sizes of its file, and no autoscaler changes them",
            *(f"{role}/{pool}: {number}" for (role, pool), number in sorted(sizes.items())),
            "why a request went where it went: pdctl why --request ID, by its x-request-id",
        ]
    )


def _decisions(written: Body) -> Iterator[tuple[ScalingDecision, object]]:
    """Decisions, the newest first, with the mode of that time; None = not known."""
    entries = written.get("lastDecisions")
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        record = read_record(entry)
        # a change of the mode is followed by a decision, so the newest was taken in the mode of the
        # status
        if record is not None:
            yield record, entry.get("mode") or (written.get("mode") if number == 0 else None)


def _section(body: Body, *path: str) -> Body:
    found: Any = body
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _nothing(name: str, mode: object) -> str:
    if mode in ("On", "Advise"):
        return (
            f"{name} has no decision yet: the first comes within a few intervals of the first "
            "ready worker"
        )
    if mode is None:
        return (
            f"{name} has no decision: autoscaling is off; set spec.autoscale.mode to Advise (only "
            "shown) or On (carried out)"
        )
    return (
        f"{name} has no decision: spec.autoscale.mode is {mode}; set it to Advise (only shown) or "
        "On (carried out)"
    )


def record_lines(name: str, mode: object, record: ScalingDecision) -> Iterator[str]:
    """mode: of the time of the decision; None = not known."""
    manner = {"On": "carried out", "Advise": "advice only"}.get(str(mode), "")
    changed = summary(record) or "no pool changes"
    yield f"{name}, {record.at:%Y-%m-%d %H:%M:%S} UTC{f', {manner}' if manner else ''}: {changed}"
    yield from table(COLUMNS, explained(record), right=(2, 3))


def why_command(
    name: Cluster = None,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="the object, or its status, from a file; - = stdin"
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(min=1, max=MAX_DECISIONS, help="how many decisions, the newest first")
    ] = 1,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="of a request, by its x-request-id or the id of its answer: why it went where it "
            "went",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="of the one worker to ask for a request")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PDCLUSTER_API_KEY", metavar="KEY", help="for a worker that asks for one"
        ),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Say why each pool has the workers that it has: metric values, rules, replicas; with
    --request, why a request went where it went.  Of a cluster that runs on this machine, else of
    one in Kubernetes.
    """
    state = state_dir or default_state_dir()
    kube_context = KubeContext(kubeconfig, context, namespace)
    with reported():
        if request is not None:
            check_key(api_key)
            query = TraceQuery(request, name, url, api_key, state)
            typer.echo(render_request(query, kube_context))
            return
        local = None if file else find_local_run(state, name, kube_context)
        if local is not None:
            typer.echo(render_why_local(local[1]))
        else:
            body = object_of_file(file, name) if file else _object(kube_context, name)
            typer.echo(render_why(body, last, datetime.now(UTC)))


def _object(kube_context: KubeContext, name: str | None) -> Body:
    if name is None:
        message = "which cluster? none runs here: give its NAME, or a file with -f"
        raise StartError(message, exit_code=2)
    return object_of_cluster(kube_context, name)
