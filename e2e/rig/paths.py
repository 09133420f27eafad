"""Paths of the test cluster, and the names of the images it holds.

Two places: `.cluster/` in the repository is one running cluster and goes with
`make cluster-down`; the cache directory holds what takes minutes to make
(Kubernetes, images) and outlives clusters.
"""

import os
from collections.abc import Mapping
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
    def vllm(self) -> Path:
        """The environment that `bench/peers/install_vllm.sh` makes."""
        return self.root / "vllm"

    @property
    def images(self) -> Path:
        """Build storage, and the store that containerd starts from."""
        return self.root / "images"

    def containerd(self, control_group: str) -> Path:
        """Images and containers of a running cluster.

        Not in its folder: its hard links are no place for a tool that rewrites a repository's
        files.
        """
        return self.images / f"of-{control_group}"


STOCK_SWITCH = "PDCLUSTER_E2E_VLLM"
HAS_STOCK_ENGINE = bool(os.environ.get(STOCK_SWITCH))
"""The cluster holds a stock engine and our server process in place of our worker: both together
would take 40 GB of disk.
"""

DIST_SWITCH = "PDCLUSTER_E2E_DIST"
DIST = Path(os.environ[DIST_SWITCH]).resolve() if os.environ.get(DIST_SWITCH) else None
"""The folder of a release whose chart and images are tested in place of this checkout's."""

LONG_SWITCH = "PDCLUSTER_E2E_LONG"
TAKES_LONG = bool(os.environ.get(LONG_SWITCH))
"""Tests that take minutes each run too, on what the API server's tests show with scripted
metrics.
"""

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
    def images(self) -> Path:
        """Names of the images that it holds, with spaces between."""
        return self.root / "images"

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

    @property
    def second(self) -> "Cluster":
        """The same files of a second node, where there is one."""
        return Cluster(self.root / "second")


@dataclass(frozen=True)
class Images:
    """Names of the images that the rig makes and loads."""

    debian: str = "localhost/pdcluster-debian:e2e"
    base: str = "localhost/pdcluster-base:e2e"
    busybox: str = "localhost/pdcluster-busybox:e2e"
    etcd: str = "localhost/pdcluster-etcd:e2e"
    operator: str = "localhost/pdcluster-operator:e2e"
    worker: str = "localhost/pdcluster-worker:e2e"
    server: str = "localhost/pdcluster-server:e2e"
    vllm: str = "localhost/stand-in-for-vllm-openai-cpu:v0.32.0"

    @property
    def tested(self) -> dict[str, str]:
        """Images by what they are of: the operator, workers, their etcd."""
        engines = (
            {"server": self.server, "vllm": self.vllm}
            if HAS_STOCK_ENGINE
            else {"worker": self.worker}
        )
        return {"operator": self.operator, "etcd": self.etcd, **engines}

    @property
    def loaded(self) -> tuple[str, ...]:
        """Images that the cluster holds: all but the base images."""
        return (self.busybox, *self.tested.values())


IMAGES = Images()


def chart_settings(images: Mapping[str, str]) -> list[str]:
    """Arguments of helm that give the chart these images, by what they are of."""
    values = {"image": images["operator"]}
    values |= {f"{name}Image": images[name] for name in ("worker", "server") if name in images}
    parts = [(value, *name.rsplit(":", 1)) for value, name in values.items()]
    return [
        *(
            f"--set-string={value}.repository={name},{value}.tag={tag}"
            for value, name, tag in parts
        ),
        f"--set-string=etcdImage={images['etcd']}",
    ]
