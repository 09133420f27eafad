"""`pdctl verify`: verifies the KV transfers of a local run, or asks the operator to.

The operator is asked by an annotation and answers in the status: it takes no right beyond editing
the object.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import NotFoundError
from pdcluster_api.apiserver.kinds import PDCLUSTER, Body
from pdcluster_api.discovery.verifier import TOTAL_SECONDS, Verifier
from pdcluster_api.errors import StartError
from pdcluster_api.plan.observed.state import Previous
from pdcluster_api.plan.status.disaggregating import readable_rate
from pdcluster_api.plan.status.transfers import FIELD, VerifiedPair, read_pairs
from pdcluster_schema import conditions as words
from pdcluster_schema import labels
from pdcluster_schema.workload import PoolPair
from pdctl.cli.completion import Cluster
from pdctl.cli.live import KubeContext, with_client
from pdctl.cli.options import Context, Kubeconfig, StateDir, reported
from pdctl.cli.status import find_local_run, transfer_line
from pdctl.cli.table import table
from pdctl.local.run_directory import RunDirectory, default_state_dir
from pdctl.local.verification import RunTransfers, content_of, has_prefill

_HEADER = ("PREFILL", "DECODE", "RESULT", "TRANSPORT", "MOVED", "RATE", "TOKENS", "WORKERS")
_NUMBERS = (4, 5, 6)
_WIDTH = 200  # names of workers stay whole, so that they can be copied
_NOTHING = "has no prefill workers, so that no KV moves between its workers"


@dataclass(frozen=True)
class VerifyTimeouts:
    """Seconds: of the operator's answer, of a local worker's, and between two polls."""

    operator: float = TOTAL_SECONDS + 30.0
    worker: float = 30.0
    poll: float = 1.0


def verify_command(
    name: Cluster = None,
    *,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="NAMESPACE", help="of one in Kubernetes"),
    ] = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    state_dir: StateDir = None,
) -> None:
    """Verify now that KV moves from each prefill pool to each decode pool, busy or not: of a
    cluster that runs on this machine, else of one in Kubernetes.

    Exit code 0 = it does; 1 = it does not, or nothing could be verified.
    """
    request, kube_context = _new_request(), KubeContext(kubeconfig, context, namespace)
    with reported():
        found = find_local_run(state_dir or default_state_dir(), name, kube_context)
        if found is not None:
            status = asyncio.run(verify_run(found[0], request))
        elif name is None:
            raise StartError("which cluster? none runs here: give its NAME", exit_code=2)
        else:
            status = verify_object(kube_context, name, request)
    typer.echo("\n".join(render_pairs(status)))
    if not Previous(status).is_true(words.KV_TRANSFER_VERIFIED):
        raise typer.Exit(1)


async def verify_run(
    run: RunDirectory, request: str, timeouts: VerifyTimeouts | None = None
) -> Mapping[str, Any]:
    """Poll until each pair has an outcome; returns it as a status.

    Raises StartError when a pair has none in time.
    """
    timeouts = timeouts or VerifyTimeouts()
    if not has_prefill(run.read_state() or {"workers": ()}):
        raise StartError(f"the cluster {_NOTHING}", exit_code=2)
    transfers, deadline = RunTransfers(run, Verifier()), time.monotonic() + timeouts.worker
    while True:
        found = await transfers.verify_due(request)
        if not found.due:
            return content_of(found)
        if time.monotonic() >= deadline:
            raise _not_verified(content_of(found))
        await asyncio.sleep(timeouts.poll)


def verify_object(
    kube_context: KubeContext, name: str, request: str, timeouts: VerifyTimeouts | None = None
) -> Mapping[str, Any]:
    """Annotate the PDCluster and wait for the operator; returns the status.

    Raises StartError when there is no such object, or a pair has no outcome in time.
    """
    namespace, timeouts = kube_context.in_namespace(), timeouts or VerifyTimeouts()

    async def annotate_and_wait(client: ApiClient) -> Mapping[str, Any]:
        patch = {"metadata": {"annotations": {labels.VERIFY: request}}}
        try:
            body = await client.merge_patch(PDCLUSTER, namespace, name, patch)
        except NotFoundError as e:
            message = f"there is no PDCluster {name} in namespace {namespace}, and none runs here"
            raise StartError(message, exit_code=2) from e
        if "mixed" in body["spec"]["roles"]:
            raise StartError(f"PDCluster {name} {_NOTHING}", exit_code=2)
        deadline = time.monotonic() + timeouts.operator
        while not is_answered(_status(body), request):
            if time.monotonic() >= deadline:
                raise _not_verified(_status(body))
            await asyncio.sleep(timeouts.poll)
            body = await client.get(PDCLUSTER, namespace, name)
        return _status(body)

    return with_client(kube_context, annotate_and_wait)


def is_answered(status: Mapping[str, Any], request: str) -> bool:
    """Return whether every pair has an outcome of this request."""
    condition = Previous(status).condition(words.KV_TRANSFER_VERIFIED)
    found = [each.verification.request for each in _pairs(status).values()]
    is_known = (
        condition.get("status") in ("True", "False")
        or condition.get("reason") == words.RATE_NOT_MEASURED
    )
    return is_known and bool(found) and all(each == request for each in found)


def render_pairs(status: Mapping[str, Any]) -> list[str]:
    lines = table(_HEADER, _rows(_pairs(status)), right=_NUMBERS, width=_WIDTH)
    return [*lines, *transfer_line(status)]


def _rows(pairs: Mapping[PoolPair, VerifiedPair]) -> Iterator[tuple[str, ...]]:
    for pair, each in sorted(pairs.items()):
        verified = each.verification
        slow_or_not = "slow" if each.num_failures else "verified"
        size, rate = (
            readable_rate(number) if number else "-"
            for number in (verified.num_bytes, verified.bytes_per_second)
        )
        yield (
            pair.prefill,
            pair.decode,
            verified.fault or slow_or_not,
            verified.transport or "-",
            size.removesuffix("/s"),
            rate,
            str(verified.num_tokens or "-"),
            f"{verified.prefill_worker or '-'} to {verified.decode_worker or '-'}",
        )


def _pairs(status: Mapping[str, Any]) -> dict[PoolPair, VerifiedPair]:
    field = Previous(status).mapping(FIELD)
    return read_pairs(field, str(field.get("revision")))


def _status(body: Body) -> Mapping[str, Any]:
    status: Mapping[str, Any] = body.get("status") or {}
    return status


def _not_verified(status: Mapping[str, Any]) -> StartError:
    known = transfer_line(status) or ["no operator has said anything of its transfers"]
    return StartError(f"not every pair of pools was verified in time; {known[0]}", exit_code=1)


def _new_request() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
