"""Paths of the test cluster, and the names of the images it holds.

Two places: `.cluster/` in the repository is one running cluster and goes with
`make cluster-down`; the cache directory holds what takes minutes to make
(Kubernetes, images) and outlives clusters.
"""

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cache:
    """Files that are built once and used by every cluster on this machine."""

    root: Path

    @property
    def kubernetes(self) -> Path:
        return self.root / "kubernetes"

    @property
    def model(self) -> Path:
        return self.root / "smollm2-135m-instruct"

    @property
    def images(self) -> Path:
        """Build storage, the images as OCI layout, and the store that containerd starts from."""
        return self.root / "images"

    def containerd(self, control_group: str) -> Path:
        """Images and containers of a running cluster.

        Not in its folder: its hard links are no place for a tool that rewrites a repository's
        files.
        """
        return self.images / f"of-{control_group}"


CACHE = Cache(Path(os.environ.get("PDCLUSTER_CACHE") or Path.home() / ".cache" / "pdcluster"))


@dataclass(frozen=True)
class Cluster:
    """The files of one running cluster."""

    root: Path = REPOSITORY / ".cluster"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def control_group(self) -> str:
        """Name of the cluster's control groups: like the folder, one of a kind on this machine."""
        return f"pdcluster-{self.root.stat().st_ino}"

    @property
    def containerd(self) -> Path:
        return CACHE.containerd(self.control_group)

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def models(self) -> Path:
        """Content of the volume `models`: the sample model, by its folder's name."""
        return self.root / "models"

    @property
    def config(self) -> Path:
        return self.root / "config"


@dataclass(frozen=True)
class Images:
    """Names of the images that the rig makes and loads."""

    debian: str = "localhost/pdcluster-debian:e2e"
    base: str = "localhost/pdcluster-base:e2e"
    busybox: str = "localhost/pdcluster-busybox:e2e"
    etcd: str = "localhost/pdcluster-etcd:e2e"
    operator: str = "localhost/pdcluster-operator:e2e"
    worker: str = "localhost/pdcluster-worker:e2e"

    @property
    def loaded(self) -> tuple[str, ...]:
        """Images that the cluster holds: all but the base images."""
        return (self.busybox, self.etcd, self.operator, self.worker)


IMAGES = Images()
