"""A real control plane on loopback: etcd, kube-apiserver and, where asked, kube-controller-manager.

Ready in a few seconds and gone with the process that started it, however that
ends.  There is no node: a pod is created and stays Pending; a test that needs
a ready pod writes its status.  Start one from the main thread: children die
with the thread that starts them.
"""

import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.apiserver.credentials import SERVICE_ADDRESS, Credentials
from tests.etcd_member import etcd_flags
from tests.ports import free_port
from tests.system.waiting import wait_for

START_SECONDS = 60.0
# enough for some hundred objects; many tests have a control plane of their own at once
MEMORY_LIMIT = "300MiB"
_CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
    "statefulset-controller",
)


def binary(name: str) -> Path:
    """A program of the built Kubernetes.  Raises FileNotFoundError that says how to build it."""
    folder = Path(
        os.environ.get("PDCLUSTER_KUBERNETES", "~/.cache/pdcluster/kubernetes")
    ).expanduser()
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: run `make kubernetes`, or let PDCLUSTER_KUBERNETES name the "
            "folder that has it"
        )
    return path


class KubectlError(Exception):
    """kubectl failed; the message is what it wrote to stderr."""


class ControlPlane:
    """Runs while it is entered.  `url` with `tls`, or `kubeconfig`, reach it as administrator.

    folder:           an empty folder for data, keys and logs
    with_controllers: run StatefulSets, owner references, quotas, disruption budgets and namespaces
                      too
    crds:             folder of CustomResourceDefinitions to apply before the controllers start, so
                      that these know them at once
    memory_limit:     of each program, as GOMEMLIMIT: near it, or above, most of the time goes into
                      collecting garbage
    """

    def __init__(
        self,
        folder: Path,
        *,
        with_controllers: bool = False,
        crds: Path | None = None,
        memory_limit: str = MEMORY_LIMIT,
    ) -> None:
        self._folder, self._with_controllers, self._crds, self._memory_limit = (
            folder,
            with_controllers,
            crds,
            memory_limit,
        )
        self._credentials = Credentials(folder)
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self._serving, self._account_key = (
            self._credentials.serving(),
            self._credentials.service_account_key(),
        )
        self.url = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = self._credentials.kubeconfig(self.url, "admin", "system:masters")
        self.tls = ssl.create_default_context(cafile=str(self._credentials.ca))
        self.tls.load_cert_chain(*self._credentials.client("admin-by-http", "system:masters"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start_etcd()
            self.start()
            if self._crds is not None:
                self._apply_crds(self._crds)
            if self._with_controllers:
                self._start_controllers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the API server, with what etcd holds; returns when it is ready."""
        self._spawn("kube-apiserver", *self._apiserver_flags())
        self._wait_for("kube-apiserver", f"{self.url}/readyz")

    def stop(self) -> None:
        """Kill the API server alone; `start` brings it back at the same address with
        the same data.
        """
        self._end("kube-apiserver")

    def close(self) -> None:
        """End everything."""
        for name in reversed(list(self._processes)):
            self._end(name)

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 - subprocess calls it so
        """Run kubectl as administrator and return its stdout.

        Raises KubectlError with its stderr.
        """
        command = [
            str(binary("kubectl")),
            "--kubeconfig",
            str(self.kubeconfig),
            "--cache-dir",
            str(self._folder / "kubectl"),
            *arguments,
        ]
        result = subprocess.run(
            command,
            input=input,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=_environment(),
        )
        if result.returncode != 0:
            raise KubectlError(result.stderr.strip())
        return result.stdout

    def kubeconfig_for(self, user: str, *groups: str) -> Path:
        """A kubeconfig of another user, with the rights that RBAC gives to the user
        and the groups.
        """
        return self._credentials.kubeconfig(self.url, user, *groups)

    def log(self, program: str) -> str:
        """The last lines that etcd, kube-apiserver or kube-controller-manager wrote."""
        return "\n".join(self._log_file(program).read_text(errors="replace").splitlines()[-30:])

    def pid(self, program: str) -> int:
        """Process id of etcd, kube-apiserver or kube-controller-manager."""
        return self._processes[program].pid

    def _start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self._etcd_port}"
        own = etcd_flags(self._folder / "etcd", client, self._peer_port)
        self._spawn("etcd", *own, "--snapshot-count=10000")
        self._wait_for("etcd", f"{client}/health")

    def _apply_crds(self, folder: Path) -> None:
        self.kubectl("apply", "--server-side", "--filename", str(folder))
        names = set(
            self.kubectl(
                "get", "customresourcedefinitions", "--output=jsonpath={.items[*].metadata.name}"
            ).split()
        )
        # An established kind is in discovery a moment after.  `kubectl wait` fails on one that has
        # no condition yet.
        wait_for(
            lambda: names <= set(self.kubectl("api-resources", "--output=name").split()),
            START_SECONDS,
            "the new kinds are known",
        )

    def _apiserver_flags(self) -> list[str]:
        certificate, key = self._serving
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            "--endpoint-reconciler-type=none",  # it would refuse to publish a loopback address
            f"--service-cluster-ip-range={SERVICE_ADDRESS}/16",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self._credentials.ca}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._account_key}",
            f"--service-account-signing-key-file={self._account_key}",
            "--authorization-mode=RBAC",
            "--allow-privileged",
            "--profiling=false",
            # Nothing creates the account `default` of a namespace when there are no controllers.
            *([] if self._with_controllers else ["--disable-admission-plugins=ServiceAccount"]),
        ]

    def _start_controllers(self) -> None:
        kubeconfig = self._credentials.kubeconfig(self.url, "system:kube-controller-manager")
        port = free_port()
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            *(
                f"--controllers={','.join(_CONTROLLERS)}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
            ),
            *(
                "--use-service-account-credentials",
                f"--service-account-private-key-file={self._account_key}",
            ),
            *(
                f"--root-ca-file={self._credentials.ca}",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
                "--profiling=false",
            ),
            *("--concurrent-statefulset-syncs=10", "--concurrent-namespace-syncs=10"),
        )
        self._wait_for(
            "kube-controller-manager", f"https://127.0.0.1:{port}/healthz", trusted=False
        )

    def _spawn(self, name: str, *flags: str) -> None:
        launcher = str(files("pdctl.local").joinpath("launcher.py"))
        with self._log_file(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-I", launcher, str(os.getpid()), str(binary(name)), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_environment(), "GOMEMLIMIT": self._memory_limit},
            )

    def _wait_for(self, name: str, url: str, *, trusted: bool = True) -> None:
        # The controller manager signs its own certificate; it is asked for its health alone.
        tls = self.tls if trusted else ssl._create_unverified_context()
        wait_for(
            lambda: self._answers(name, url, tls),
            START_SECONDS,
            lambda: f"{name} is not ready; its log ends:\n{self.log(name)}",
        )

    def _answers(self, name: str, url: str, tls: ssl.SSLContext) -> bool:
        code = self._processes[name].poll()
        assert code is None, f"{name} ended with {code}; its log ends:\n{self.log(name)}"
        try:
            with urllib.request.urlopen(url, timeout=5.0, context=tls) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as e:
            e.close()
            return False
        except OSError:
            return False

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def _log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _environment() -> dict[str, str]:
    """This process's environment without what would send kubectl or a client elsewhere."""
    aside = {"KUBECONFIG", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"}
    return {
        **{name: value for name, value in os.environ.items() if name not in aside},
        "KUBERC": "off",
    }
