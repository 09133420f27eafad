"""`pdctl why --request`: a request's traces, from workers or by the API server's pod proxy.

Workers that do not answer are skipped, and listed on stderr.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import typer

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, NotFoundError
from pdcluster_api.apiserver.kinds import POD
from pdcluster_api.errors import StartError, no_answer
from pdcluster_schema import labels
from pdcluster_schema.ports import HTTP_PORT
from pdctl.cli.live import KubeContext, with_client
from pdctl.cli.status import find_local_run
from pdctl.cli.table import table

_SECONDS = 5.0

TraceBody = Mapping[str, Any]


@dataclass(frozen=True)
class WorkerTraces:
    """problem: why the worker has no trace; None with no traces = it does not know the request."""

    worker: str
    traces: tuple[TraceBody, ...] = ()
    problem: str | None = None


def traces_at(
    addresses: Mapping[str, str], request_id: str, api_key: str | None
) -> list[WorkerTraces]:
    """addresses: base URLs by name."""

    async def ask_all() -> list[WorkerTraces]:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            reads = (_of_address(session, name, url, request_id) for name, url in addresses.items())
            return list(await asyncio.gather(*reads))

    return asyncio.run(ask_all())


async def _of_address(
    session: aiohttp.ClientSession, name: str, url: str, request_id: str
) -> WorkerTraces:
    try:
        async with session.get(f"{url.rstrip('/')}{_path(request_id)}") as response:
            body = await response.json()
            if response.status == 404:
                return WorkerTraces(name)
            if response.status == 401:
                fix = "give the cluster's key by PDCLUSTER_API_KEY or --api-key"
                return WorkerTraces(name, problem=f"401: {_message(body)}; {fix}")
            if response.status != 200:
                return WorkerTraces(name, problem=f"{response.status}: {_message(body)}")
            return WorkerTraces(name, _traces(body))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
        return WorkerTraces(name, problem=f"does not answer: {no_answer(e)}")


def traces_in_cluster(kube_context: KubeContext, name: str, request_id: str) -> list[WorkerTraces]:
    """Raises StartError when the API server cannot be reached."""
    namespace = kube_context.in_namespace()

    async def ask_pods(client: ApiClient) -> list[WorkerTraces]:
        selector = f"{labels.CLUSTER}={name},{labels.ROLE}"
        pods = [
            pod["metadata"]["name"] async for pod in client.list(POD, namespace, labels=selector)
        ]
        return list(
            await asyncio.gather(*(_of_pod(client, namespace, pod, request_id) for pod in pods))
        )

    return with_client(kube_context, ask_pods)


async def _of_pod(client: ApiClient, namespace: str, pod: str, request_id: str) -> WorkerTraces:
    try:
        return WorkerTraces(
            pod, _traces(await client.proxied(namespace, pod, HTTP_PORT, _path(request_id)))
        )
    except NotFoundError:
        return WorkerTraces(pod)
    except ClusterError as e:
        fix = (
            f"kubectl port-forward {pod} {HTTP_PORT}, then give --url http://127.0.0.1:{HTTP_PORT} "
            "and --api-key"
        )
        return WorkerTraces(pod, problem=f"cannot be asked through the API server: {e}; {fix}")


def find_traces(found: Sequence[WorkerTraces], request_id: str) -> list[tuple[str, TraceBody]]:
    """(worker, trace), the ingress first; workers that have none for a problem stand on stderr.

    Raises StartError (exit code 1) when there is none.
    """
    traces = [(each.worker, trace) for each in found for trace in each.traces]
    problems = [f"{each.worker} {each.problem}" for each in found if each.problem is not None]
    if traces:
        for problem in problems:
            typer.echo(f"warning: {problem}", err=True)
        return sorted(
            traces, key=lambda pair: (_role(pair[1]) != "ingress", pair[1].get("began_unix", 0.0))
        )
    if not found:
        raise StartError("no worker is there to ask", exit_code=1)
    message = _unknown(len(found), len(problems), request_id)
    raise StartError("\n".join([message, *problems]), exit_code=1)


def _unknown(num_workers: int, num_problems: int, request_id: str) -> str:
    known = f"request {request_id}: each keeps its last 2048 that have ended"
    if not num_problems:
        return f"none of {num_workers} workers knows {known}"
    silent = f"{num_problems} of {num_workers} workers could not be asked"
    if num_problems == num_workers:
        return f"{silent} for request {request_id}"
    return f"{silent}; the others do not know {known}"


def _role(trace: TraceBody) -> object:
    events = trace.get("events") or [{}]
    return events[0].get("facts", {}).get("role")


def _path(request_id: str) -> str:
    return f"/debug/requests/{quote(request_id, safe='')}"


def _traces(body: Any) -> tuple[TraceBody, ...]:
    found = body.get("journeys") if isinstance(body, dict) else None
    return (
        tuple(each for each in found if isinstance(each, dict)) if isinstance(found, list) else ()
    )


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else "no reason given"


COLUMNS = ("MS", "WHAT", "WORKER", "BY")


def trace_lines(worker: str, trace: TraceBody) -> Iterator[str]:
    """A header line, and a table of events.

    >>> event = {"name": "decode", "seconds": 0.0015, "worker": "", "facts": {"worker": "d1",
    ...     "cost": 2.0}}
    >>> trace = {"request_id": "r", "began_unix": 0.0, "events": [event]}
    >>> print(*trace_lines("d0", trace), sep="\\n")
    request r at d0, 1970-01-01 00:00:00 UTC
     MS  WHAT    WORKER  BY
    1.5  decode  d0      worker d1, cost 2
    """
    began = datetime.fromtimestamp(float(trace.get("began_unix", 0.0)), UTC)
    yield f"request {trace.get('request_id')} at {worker}, {began:%Y-%m-%d %H:%M:%S} UTC"
    rows = [
        (
            f"{1000.0 * float(event.get('seconds', 0.0)):.1f}",
            str(event.get("name")),
            str(event.get("worker") or worker),
            _facts(event.get("facts")),
        )
        for event in trace.get("events", ())
    ]
    yield from table(COLUMNS, rows, right=(0,))


def _facts(facts: Any) -> str:
    if not isinstance(facts, Mapping):
        return ""
    return ", ".join(f"{name} {_value(value)}" for name, value in facts.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    traces = find_traces(_worker_traces(query, kube_context), query.request_id)
    return "\n\n".join("\n".join(trace_lines(worker, trace)) for worker, trace in traces)


def _worker_traces(query: TraceQuery, kube_context: KubeContext) -> list[WorkerTraces]:
    if query.url is not None:
        return traces_at({query.url: query.url}, query.request_id, query.api_key)
    local = find_local_run(query.state_dir, query.name, kube_context)
    if local is not None:
        workers = local[1]["workers"]
        addresses = {
            worker["name"]: f"http://{worker['http']}" for worker in workers if worker["http"]
        }
        return traces_at(addresses, query.request_id, query.api_key)
    if query.name is None:
        message = (
            "which cluster? none runs on this machine: give the NAME of one in Kubernetes, or "
            "--url of a worker"
        )
        raise StartError(message, exit_code=2)
    return traces_in_cluster(kube_context, query.name, query.request_id)
