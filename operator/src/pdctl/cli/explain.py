"""`pdctl why`, `plan` and `autoscale replay`; they change nothing."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pdcluster_api.errors import InvalidTraceError, StartError
from pdcluster_api.plan.autoscale.explain import MAX_DECISIONS
from pdcluster_schema.errors import InvalidObjectError
from pdcluster_schema.load import load_applied
from pdcluster_schema.pdcluster import PDCluster
from pdctl.cli.live import KubeContext, read_live
from pdctl.cli.local_run import find_local_run
from pdctl.cli.preview import preview_of_cluster, preview_of_files, render_preview
from pdctl.cli.refusals import failed, load_file, refused
from pdctl.cli.replay import ReplayRequest, run_replay
from pdctl.cli.request import TraceQuery, render_request
from pdctl.cli.why import Body, object_of_cluster, object_of_file, render_why, render_why_local
from pdctl.local.run_directory import default_state_dir
from pdctl.preview.immutable import identity_faults
from pdctl.preview.preview import Preview
from pdctl.replay.speeds import Speeds

Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAMESPACE", help="of the cluster; else that of the context"
    ),
]
Context = Annotated[
    str | None, typer.Option(metavar="CONTEXT", help="of the kubeconfig; else its current one")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="else KUBECONFIG, or ~/.kube/config")
]

autoscale = typer.Typer(help="Try the autoscaler without a cluster.", no_args_is_help=True)


def why_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="of the cluster", show_default=False)
    ] = None,
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
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where runs of pdctl up keep state")
    ] = None,
) -> None:
    """Say why each pool has the workers that it has: metric values, rules, replicas; with
    --request, why a request went where it went.  Of a cluster that runs on this machine, else of
    one in Kubernetes.
    """
    state = state_dir or default_state_dir()
    if request is not None:
        query = TraceQuery(request, name, url, api_key, state)
        try:
            typer.echo(render_request(query, KubeContext(kubeconfig, context, namespace)))
        except StartError as e:
            raise failed(e) from e
        return
    kube_context = KubeContext(kubeconfig, context, namespace)
    try:
        local = None if file else find_local_run(state, name, kube_context)
        if local is not None:
            typer.echo(render_why_local(local[1]))
        else:
            body = object_of_file(file, name) if file else _object(kube_context, name)
            typer.echo(render_why(body, last, datetime.now(UTC)))
    except StartError as e:
        raise failed(e) from e


def _object(kube_context: KubeContext, name: str | None) -> Body:
    if name is None:
        message = "which cluster? none runs here: give its NAME, or a file with -f"
        raise StartError(message, exit_code=2)
    return object_of_cluster(kube_context, name)


def plan_command(
    file: Annotated[
        Path,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="the PDCluster that would be applied",
            show_default=False,
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="compare with this file instead of the cluster's object"),
    ] = None,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Say what applying a file would do, before it is applied: revision, accelerators, pools,
    what would be refused.
    """
    try:
        new = load_applied(file)
    except InvalidObjectError as e:
        raise refused(file, e.faults) from e
    if against is None:
        new, found = _against_cluster(new, KubeContext(kubeconfig, context, namespace))
    else:
        old = load_file(against)
        if faults := identity_faults(old, new):
            raise refused(file, faults)
        found = preview_of_files(new, old)
    typer.echo(render_preview(new, found))
    if found.refused:
        typer.echo("The API server would refuse it, and nothing of this would happen:", err=True)
        raise refused(file, found.refused)


def _against_cluster(new: PDCluster, kube_context: KubeContext) -> tuple[PDCluster, Preview]:
    """Preview against the cluster, with the namespace of the options, the file or the context."""
    given = new.metadata.namespace if "namespace" in new.metadata.model_fields_set else None
    try:
        if given is not None and kube_context.namespace not in (None, given):
            message = (
                f"the file's metadata.namespace is {given}, and --namespace is "
                f"{kube_context.namespace}; "
                "leave one out, or make them equal"
            )
            raise StartError(message, exit_code=2)
        kube_context = KubeContext(
            kube_context.kubeconfig, kube_context.context, kube_context.namespace or given
        )
        metadata = new.metadata.model_copy(update={"namespace": kube_context.in_namespace()})
        new = new.model_copy(update={"metadata": metadata})
        found, remark = preview_of_cluster(
            new,
            read_live(
                KubeContext(kube_context.kubeconfig, kube_context.context, metadata.namespace),
                metadata.name,
            ),
        )
    except StartError as e:
        raise failed(e) from e
    if remark is not None:
        typer.echo(f"note: {remark}", err=True)
    return new, found


@autoscale.callback()
def _group() -> None:
    """Keeps `replay` a subcommand while it is the only one."""


@autoscale.command("replay")
def replay_command(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="CSV: seconds,requests_per_second,input_tokens,output_tokens"
        ),
    ],
    file: Annotated[
        Path,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="a PDCluster with a section autoscale",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write a table, the decisions and a picture there"),
    ] = None,
    plot: Annotated[
        bool, typer.Option(help="the picture; it needs matplotlib (the extra `replay`)")
    ] = True,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(help="of a busy prefill worker")
    ] = Speeds.prefill_tokens_per_second,
    step_seconds: Annotated[
        float, typer.Option(help="of a decode step with one stream")
    ] = Speeds.step_seconds,
    stream_seconds: Annotated[
        float, typer.Option(help="that each further stream adds to a step")
    ] = Speeds.stream_seconds,
    kv_tokens: Annotated[
        float, typer.Option(help="that a decode worker's KV cache holds")
    ] = Speeds.kv_tokens,
    start_seconds: Annotated[
        float, typer.Option(help="until a new worker is ready")
    ] = Speeds.start_seconds,
) -> None:
    """Run a trace of load through the autoscaler of a file, on a simulated cluster."""
    cluster = load_file(file)
    try:
        speeds = Speeds(
            prefill_tokens_per_second, step_seconds, stream_seconds, kv_tokens, start_seconds
        )
    except InvalidTraceError as e:
        raise failed(StartError(str(e), exit_code=2)) from e
    try:
        typer.echo(
            "\n".join(run_replay(ReplayRequest(trace, cluster, speeds, out, with_plot=plot)))
        )
    except InvalidTraceError as e:
        raise refused(trace, e.faults) from e
    except InvalidObjectError as e:
        raise refused(file, e.faults) from e
    except StartError as e:
        raise failed(e) from e
