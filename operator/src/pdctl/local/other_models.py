"""Addresses of `service.models` on one machine: of the runs of their clusters."""

from pathlib import Path

from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.run_directory import runs


def local_addresses(cluster: PDCluster, state_dir: Path) -> dict[str, str]:
    """host:port by the model's name; "" while its cluster does not run here."""
    return {
        model.name: _ingress_address(model.cluster, state_dir)
        for model in cluster.spec.service.models
    }


def _ingress_address(name: str, state_dir: Path) -> str:
    for run in reversed(runs(state_dir, name)):
        state = run.read_state() if run.is_alive else None
        for worker in (state or {}).get("workers", ()):
            if state and worker["name"] == state["ingress"] and worker["http"]:
                return str(worker["http"])
    return ""
