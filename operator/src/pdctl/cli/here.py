"""The cluster that a command is about: one that runs on this machine, or one in Kubernetes."""

from pathlib import Path
from typing import Any

from pdcluster_api.errors import StartError
from pdctl.cli.live import Place
from pdctl.cli.status import find_directory, names_here
from pdctl.local.run_directory import RunDirectory

Found = tuple[RunDirectory, dict[str, Any]]


def found_here(state_dir: Path, name: str | None, place: Place) -> Found | None:
    """The run of that name, or the only one; None = the cluster is one in Kubernetes.

    place: a cluster in Kubernetes is meant if any of it is given.  Raises StartError where neither
    a run here nor a kubeconfig is there to be meant, and for no name where several runs are.
    """
    if place != Place():
        return None
    names = names_here(state_dir)
    if name in names or (name is None and names):
        return find_directory(state_dir, name)
    if name is None or not names or place.has_file():
        return None
    raise StartError(
        f"no cluster named {name} runs here, only {', '.join(names)}; for one in Kubernetes set "
        "KUBECONFIG, or give --kubeconfig",
        exit_code=2,
    )
