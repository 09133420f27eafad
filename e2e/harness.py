"""Actions of the tests on a cluster: kubectl, helm, questions through the Service, and a dump of
everything when a test fails.

The cluster is the rig's (`e2e.rig`), or any that PDCLUSTER_KUBECONFIG names; the
tests know no difference.  Requests come from a pod of the cluster, so that they
take the way of a user's: the Service's name, its address, a ready decode pod.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from e2e.rig import cluster as rig
from e2e.rig import removal
from e2e.rig.images import released
from e2e.rig.paths import CACHE, DIST, IMAGES, REPOSITORY, STOCK_SWITCH, chart_settings
from e2e.rig.paths import Cluster as RigCluster
from e2e.rig.shell import run
from tests.system.waiting import wait_for

Json = dict[str, Any]

OPERATOR_NAMESPACE = "pdcluster-system"
RELEASE = "pdcluster"
NAME = "chat"  # of examples/chat.yaml
SELECTOR = f"pdcluster.io/cluster={NAME}"
EXAMPLE = REPOSITORY / "examples" / "chat.yaml"
CLIENT_POD = "e2e-client"
CLIENT_PROGRAM = Path(__file__).with_name("client_program.py")
READY_SECONDS = 300.0
LOOK_SECONDS = 0.5  # between two looks of a test that waits: each costs what the workers have, too
ARTIFACTS = Path(__file__).parent / ".artifacts"
FLEET_ENGINE = {
    "maxBatchedTokens": 256,
    "maxModelLen": 4096,
    "kvCacheMemory": "1Gi",
    "transferBandwidth": 40_000_000,  # slow enough that a long prompt is on its way for seconds
}


@dataclass(frozen=True)
class Kubernetes:
    """A cluster to test on.

    images: operator, etcd and worker, or server and vllm in its place, by these keys: names under
            which the cluster's nodes have them or can pull them
    rig: where it is the rig's, that
    """

    kubeconfig: Path
    images: dict[str, str] = field(default_factory=dict)
    rig: RigCluster | None = None

    def kubectl(self, *arguments: object, stdin: str | None = None) -> str:
        """Run kubectl to its end and return its stdout.  Raises CommandError with what it said."""
        return run([*self._kubectl, *arguments], stdin=stdin)

    def start(self, *arguments: object) -> "subprocess.Popen[str]":
        """Start kubectl, to be read as it goes and ended by the caller."""
        return subprocess.Popen(
            [str(word) for word in (*self._kubectl, *arguments)], stdout=subprocess.PIPE, text=True
        )

    def get(self, *arguments: object) -> Json:
        """`kubectl get` as JSON: one object, or a list with `items`."""
        answer: Json = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return answer

    def pods(self, *more: str) -> list[Json]:
        """The pods of the example, without those that are ending.  more: further labels, as
        KEY=VALUE.
        """
        listed = self.get("pods", f"--selector={','.join((SELECTOR, *more))}")["items"]
        return [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]

    def is_ready(self, generation: int | None = None) -> bool:
        """True if the example's Ready is true and of the newest generation."""
        status = self.get(f"pdc/{NAME}").get("status", {})
        wanted = generation or self.get(f"pdc/{NAME}")["metadata"]["generation"]
        return status.get("observedGeneration") == wanted and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions", [])
        )

    def scale(self, **replicas: int) -> None:
        """Ask for so many workers of each role of the example, by `kubectl scale`."""
        for role, number in replicas.items():
            self.kubectl("scale", f"pdps/{NAME}-{role}-cpu", f"--replicas={number}")

    def replace(self, spec: Json) -> None:
        """Make the example's spec this one, and nothing else.

        By a patch: `kubectl replace` reads and writes, and fails where the operator writes the
        status between the two.
        """
        patch = [{"op": "replace", "path": "/spec", "value": spec}]
        self.kubectl("patch", f"pdc/{NAME}", "--type=json", f"--patch={json.dumps(patch)}")

    def evict(self, pod: str, *, grace_seconds: int | None = None) -> None:
        """Evict a pod as `kubectl drain` does, with its `--grace-period`; None = the pod's own.

        Raises CommandError where a PodDisruptionBudget refuses it.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": "default"},
            "deleteOptions": {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds},
        }
        self.kubectl(
            "create",
            f"--raw=/api/v1/namespaces/default/pods/{pod}/eviction",
            "--filename=-",
            stdin=json.dumps(body),
        )

    def helm(self, *arguments: object) -> str:
        """Run helm in the operator's namespace.  Raises CommandError."""
        return run(
            [
                REPOSITORY / ".venv/bin/helm",
                f"--kubeconfig={self.kubeconfig}",
                f"--namespace={OPERATOR_NAMESPACE}",
                *arguments,
            ]
        )

    def install_operator(self, *settings: str) -> None:
        """Install the chart, or upgrade it to the same values and these settings of helm; returns
        when the operator is available.
        """
        with TemporaryDirectory() as folder:  # from an archive, as a release's
            if DIST:
                archive = released("pdcluster-*.tgz")
            else:
                self.helm("package", REPOSITORY / "charts/pdcluster", f"--destination={folder}")
                (archive,) = Path(folder).iterdir()
            self.helm(
                "upgrade",
                "--install",
                "--create-namespace",
                "--wait",
                "--timeout=3m",
                RELEASE,
                archive,
                *chart_settings(self.images),
                *settings,
            )

    def ask(self, *arguments: object) -> list[Json]:
        """Run the client program (see there) in the client pod; one entry for each
        line it printed.
        """
        command = ["exec", "--stdin", CLIENT_POD, "--", "python", "-", *arguments]
        return [
            json.loads(line)
            for line in self.kubectl(*command, stdin=CLIENT_PROGRAM.read_text()).splitlines()
        ]

    @contextmanager
    def load(self, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
        """The client program while it runs, to read line by line; killed when the block is left
        before it ended.
        """
        command = [
            str(word)
            for word in (
                *self._kubectl,
                "exec",
                "--stdin",
                CLIENT_POD,
                "--",
                "python",
                "-",
                *arguments,
            )
        ]
        with (
            CLIENT_PROGRAM.open() as program,
            subprocess.Popen(command, stdin=program, stdout=subprocess.PIPE, text=True) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def start_client(self) -> None:
        """A pod that can run Python, from the worker's image, with nothing of a worker."""
        container = {
            "name": "client",
            "image": self.images[self._worker],
            "imagePullPolicy": "IfNotPresent",
            "command": ["python", "-c", "import signal; signal.sigwait([signal.SIGTERM])"],
            "resources": {"requests": {"cpu": "50m"}},
        }
        spec = {
            "containers": [container],
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": CLIENT_POD}, "spec": spec}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(pod))
        self.kubectl("wait", "--for=condition=Ready", f"pod/{CLIENT_POD}", "--timeout=120s")

    @property
    def _worker(self) -> str:
        """Name of our image that workers run."""
        return "worker" if "worker" in self.images else "server"

    @property
    def program(self) -> Path:
        """The kubectl to use."""
        return Path(shutil.which("kubectl") or CACHE.kubernetes / "kubectl")

    @property
    def _kubectl(self) -> tuple[object, ...]:
        return (self.program, f"--kubeconfig={self.kubeconfig}")


def example() -> Json:
    """The object of examples/chat.yaml."""
    body: Json = yaml.safe_load(EXAMPLE.read_text())
    return body


def ready(pods: list[Json]) -> list[Json]:
    """Those of the pods that are ready."""
    return [
        pod
        for pod in pods
        if any(
            each["type"] == "Ready" and each["status"] == "True"
            for each in pod["status"].get("conditions", [])
        )
    ]


def wait_for_workers(
    cluster: Kubernetes, *, seconds: float = READY_SECONDS, **replicas: int
) -> None:
    """Wait until each role has exactly so many pods, all ready, and the status agrees.

    A pod that is still ending counts as one too many.
    """
    wanted = {role: f"{number}/{number}" for role, number in replicas.items()}

    def is_there() -> bool:
        status = cluster.get(f"pdc/{NAME}").get("status", {})
        pods = cluster.get("pods", f"--selector={SELECTOR},pdcluster.io/role")["items"]
        numbers = Counter(pod["metadata"]["labels"]["pdcluster.io/role"] for pod in pods)
        said = {role: status.get(role) for role in replicas}
        return (numbers, said, len(ready(pods))) == (
            replicas,
            wanted,
            len(pods),
        ) and cluster.is_ready()

    wait_for(
        is_there, seconds, lambda: cluster.kubectl("get", "pods,pdc"), poll_seconds=LOOK_SECONDS
    )


def wait_until(cluster: Kubernetes, is_so: Callable[[], bool]) -> None:
    wait_for(
        is_so, READY_SECONDS, lambda: cluster.kubectl("get", "pods,pdc"), poll_seconds=LOOK_SECONDS
    )


@contextmanager
def kubernetes() -> Iterator[Kubernetes]:
    """The cluster of PDCLUSTER_KUBECONFIG, or the rig: one that is up is used and left up, else one
    is started and removed.

    Another cluster needs the images (PDCLUSTER_OPERATOR_IMAGE, PDCLUSTER_WORKER_IMAGE,
    PDCLUSTER_ETCD_IMAGE, with tags; with PDCLUSTER_E2E_VLLM, PDCLUSTER_SERVER_IMAGE and
    PDCLUSTER_VLLM_IMAGE in place of the worker's) and a PersistentVolumeClaim `models` in namespace
    default with the folder smollm2-135m-instruct.
    """
    if kubeconfig := os.environ.get("PDCLUSTER_KUBECONFIG"):
        yield Kubernetes(
            Path(kubeconfig),
            {key: _image_of_environment(key) for key in IMAGES.tested},
        )
        return
    local, images = RigCluster(), IMAGES.tested
    if removal.is_running(local):
        missing = set(images.values()) - set(local.images.read_text().split())
        if missing:
            raise ValueError(
                f"the cluster that is up has no {', '.join(sorted(missing))}: end it with "
                f"`make cluster-down`, and set {STOCK_SWITCH} where vLLM is to be tested"
            )
        yield Kubernetes(local.kubeconfig, images, local)
        return
    try:
        rig.up(local)
        yield Kubernetes(local.kubeconfig, images, local)
    # it did not start, or the test was interrupted: its log goes with the error
    except BaseException:
        removal.save_logs(local, ARTIFACTS / "rig")
        raise
    finally:
        removal.down(local)


def save_state(cluster: Kubernetes, folder: Path) -> None:
    """Write objects, events and the logs of every container into the folder, and beside it those of
    the rig, once for all tests.

    Does not raise: the failed test is the error to report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if cluster.rig is not None:
        removal.save_logs(cluster.rig, folder.with_name("rig"))
    kinds = "pdc,pdps,statefulsets,deployments,controllerrevisions,pods,services,endpointslices,"
    kinds += "configmaps,pvc,pdb,networkpolicies,leases"
    _save(cluster, folder / "objects.yaml", "get", kinds, "--all-namespaces", "--output=yaml")
    _save(cluster, folder / "pods.txt", "get", "pods", "--all-namespaces", "--output=wide")
    _save(
        cluster,
        folder / "events.txt",
        "get",
        "events",
        "--all-namespaces",
        "--sort-by=.lastTimestamp",
    )
    for line in _save(
        cluster, folder / "names", "get", "pods", "--all-namespaces", "--no-headers"
    ).splitlines():
        namespace, pod = line.split()[:2]
        logs = (
            "logs",
            pod,
            f"--namespace={namespace}",
            "--all-containers",
            "--prefix",
            "--tail=2000",
        )
        _save(cluster, folder / f"{namespace}.{pod}.log", *logs)
        _save(cluster, folder / f"{namespace}.{pod}.previous.log", *logs, "--previous")


def _save(cluster: Kubernetes, path: Path, *arguments: str) -> str:
    """Write what kubectl says into a file; returns it, and nothing where kubectl failed."""
    try:
        text = cluster.kubectl(*arguments)
    except Exception as e:  # whatever it is, it belongs into the file
        path.write_text(f"{e}\n")
        return ""
    path.write_text(text)
    return text


def _image_of_environment(key: str) -> str:
    variable = f"PDCLUSTER_{key.upper()}_IMAGE"
    image = os.environ.get(variable, "")
    if ":" not in image.rpartition("/")[2]:
        raise ValueError(
            f"{variable} is {image!r}: with PDCLUSTER_KUBECONFIG, name an image with a tag that "
            "the cluster has or can pull"
        )
    return image
