"""Decides whether a command means a cluster of this machine or one in Kubernetes."""

from pathlib import Path
from typing import Any

from pdcluster_api.errors import StartError
from pdctl.cli.live import KubeContext
from pdctl.cli.status import find_directory, local_names
from pdctl.local.run_directory import RunDirectory

LocalRun = tuple[RunDirectory, dict[str, Any]]


def find_local_run(state_dir: Path, name: str | None, kube_context: KubeContext) -> LocalRun | None:
    """None = Kubernetes is meant: an option of it is given, or no run here matches.

    Raises StartError where neither a matching run nor a kubeconfig exists, and without a name
    where several run.
    """
    if kube_context != KubeContext():
        return None
    names = local_names(state_dir)
    if name in names or (name is None and names):
        return find_directory(state_dir, name)
    if name is None or not names or kube_context.has_file():
        return None
    raise StartError(
        f"no cluster named {name} runs here, only {', '.join(names)}; for one in Kubernetes set "
        "KUBECONFIG, or give --kubeconfig",
        exit_code=2,
    )
