"""Choose the workers for `pdctl why --request`: one address, a local cluster, or one in
Kubernetes.
"""

from dataclasses import dataclass
from pathlib import Path

from pdcluster_api.errors import StartError
from pdctl.cli.journey_text import journey_lines
from pdctl.cli.journeys import Found, known, of_addresses, of_cluster
from pdctl.cli.live import Place
from pdctl.cli.status import find_run
from pdctl.local.run_directory import runs


@dataclass(frozen=True)
class AskedRequest:
    """A request, and what narrows the search.  name: of a cluster; url: of one worker."""

    request_id: str
    name: str | None
    url: str | None
    api_key: str | None
    state_dir: Path


def render_request(asked: AskedRequest, place: Place) -> str:
    """Journeys of the request, by worker.  Raises StartError when no worker knows it."""
    journeys = known(_found(asked, place), asked.request_id)
    return "\n\n".join("\n".join(journey_lines(worker, journey)) for worker, journey in journeys)


def _found(asked: AskedRequest, place: Place) -> list[Found]:
    if asked.url is not None:
        return of_addresses({asked.url: asked.url}, asked.request_id, asked.api_key)
    if any(run.is_alive for run in runs(asked.state_dir, asked.name or "*")):
        workers = find_run(asked.state_dir, asked.name)["workers"]
        addresses = {
            worker["name"]: f"http://{worker['http']}" for worker in workers if worker["http"]
        }
        return of_addresses(addresses, asked.request_id, asked.api_key)
    if asked.name is None:
        message = (
            "which cluster? none runs on this machine: give the NAME of one in Kubernetes, or "
            "--url of a worker"
        )
        raise StartError(message, exit_code=2)
    return of_cluster(place, asked.name, asked.request_id)
