"""`pdctl why --request`: chooses the workers to ask."""

from dataclasses import dataclass
from pathlib import Path

from pdcluster_api.errors import StartError
from pdctl.cli.live import KubeContext
from pdctl.cli.status import find_run
from pdctl.cli.trace_text import trace_lines
from pdctl.cli.traces import WorkerTraces, known, of_addresses, of_cluster
from pdctl.local.run_directory import runs


@dataclass(frozen=True)
class TraceQuery:
    """name: of a cluster; url: of one worker."""

    request_id: str
    name: str | None
    url: str | None
    api_key: str | None
    state_dir: Path


def render_request(query: TraceQuery, kube_context: KubeContext) -> str:
    """Raises StartError when no worker knows the request."""
    traces = known(_worker_traces(query, kube_context), query.request_id)
    return "\n\n".join("\n".join(trace_lines(worker, trace)) for worker, trace in traces)


def _worker_traces(query: TraceQuery, kube_context: KubeContext) -> list[WorkerTraces]:
    if query.url is not None:
        return of_addresses({query.url: query.url}, query.request_id, query.api_key)
    if any(run.is_alive for run in runs(query.state_dir, query.name or "*")):
        workers = find_run(query.state_dir, query.name)["workers"]
        addresses = {
            worker["name"]: f"http://{worker['http']}" for worker in workers if worker["http"]
        }
        return of_addresses(addresses, query.request_id, query.api_key)
    if query.name is None:
        message = (
            "which cluster? none runs on this machine: give the NAME of one in Kubernetes, or "
            "--url of a worker"
        )
        raise StartError(message, exit_code=2)
    return of_cluster(kube_context, query.name, query.request_id)
