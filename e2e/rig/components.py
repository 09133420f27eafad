"""The command lines of the cluster's programs and the configuration files that they read; nothing
is started here.

Paths are those inside the box (see `box`), where /run and /var/lib/* are the
cluster's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.rig.paths import CACHE, IMAGES, Cluster
from tests.apiserver.credentials import SERVICE_ADDRESS, Credentials

NODE = "rig"
NODE_ADDRESS = "172.30.0.1"
POD_RANGE = "10.244.0.0/24"
API_PORT = 6443
API_URL = f"https://127.0.0.1:{API_PORT}"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

_COREDNS = """\
.:53 {
    errors
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa {
        kubeconfig %s
        ttl 5
    }
}
"""

_CONTAINERD = f"""\
version = 2
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGES.busybox}"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "%s"
"""


@dataclass(frozen=True)
class Component:
    """A program that runs as long as the cluster does."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    # a TCP port of loopback, or a socket file, that must answer before the next component starts
    ready: int | str | None = None


def write_all(cluster: Cluster, credentials: Credentials, api_url: str) -> Path:
    """Write every file and the list of components (components.json) into the cluster's folder.

    api_url: address of the API server from outside the box.  Returns the administrator's kubeconfig
             for that address.
    """
    config = cluster.config
    config.mkdir()
    files: dict[str, str] = {
        "containerd.toml": _CONTAINERD % (config / "cni"),
        "cni/10-bridge.conflist": json.dumps(_network()),
        "resolv.conf": f"nameserver {NODE_ADDRESS}\n",
        "kubelet.yaml": yaml.safe_dump(_kubelet(cluster, credentials)),
    }
    users = {
        "admin": ("admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager",),
        "scheduler": ("system:kube-scheduler",),
        "proxy": ("system:kube-proxy",),
        "kubelet": (f"system:node:{NODE}", "system:nodes"),
        "dns": ("dns", "system:masters"),
    }
    kubeconfigs = {
        name: str(credentials.kubeconfig(API_URL, *user)) for name, user in users.items()
    }
    files["Corefile"] = _COREDNS % kubeconfigs["dns"]
    files["proxy.yaml"] = yaml.safe_dump(_proxy(kubeconfigs["proxy"]))
    listed = [component.__dict__ for component in _components(config, credentials, kubeconfigs)]
    files["components.json"] = json.dumps(listed, indent=2)
    for name, text in files.items():
        path = config / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return credentials.kubeconfig(api_url, "administrator", "system:masters")


def _components(
    config: Path, credentials: Credentials, kubeconfigs: Mapping[str, str]
) -> list[Component]:
    def program(name: str, *flags: str, ready: int | str | None = None) -> Component:
        return Component(
            name, (str(CACHE.kubernetes / name), *flags), {"GOMEMLIMIT": "400MiB"}, ready
        )

    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        program(
            "etcd",
            *("--name=rig", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn"),
            *(
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
            ),
            *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=rig={peer}"),
            ready=2379,
        ),
        program("kube-apiserver", *_apiserver_flags(credentials), ready=API_PORT),
        program(
            "kube-controller-manager",
            *(
                f"--kubeconfig={kubeconfigs['controller-manager']}",
                "--leader-elect=false",
                "--use-service-account-credentials",
            ),
            *(
                f"--service-account-private-key-file={credentials.service_account_key()}",
                f"--root-ca-file={credentials.ca}",
            ),
            *(f"--cluster-cidr={POD_RANGE}", "--profiling=false"),
        ),
        program(
            "kube-scheduler",
            f"--kubeconfig={kubeconfigs['scheduler']}",
            "--leader-elect=false",
            "--profiling=false",
        ),
        Component(
            "containerd",
            ("containerd", "--config", str(config / "containerd.toml")),
            {},
            CONTAINERD_SOCKET,
        ),
        program(
            "kubelet",
            *(
                f"--kubeconfig={kubeconfigs['kubelet']}",
                f"--config={config / 'kubelet.yaml'}",
                f"--hostname-override={NODE}",
            ),
            "--cert-dir=/var/lib/kubelet/pki",
        ),
        program("kube-proxy", f"--config={config / 'proxy.yaml'}", f"--hostname-override={NODE}"),
        program("coredns", f"-conf={config / 'Corefile'}"),
    ]


def _apiserver_flags(credentials: Credentials) -> list[str]:
    certificate, key = credentials.serving()
    kubelet_certificate, kubelet_key = credentials.client("apiserver-of-kubelet", "system:masters")
    account_key = credentials.service_account_key()
    return [
        *(
            "--etcd-servers=http://127.0.0.1:2379",
            f"--secure-port={API_PORT}",
            f"--advertise-address={NODE_ADDRESS}",
        ),
        *(
            f"--service-cluster-ip-range={SERVICE_ADDRESS}/24",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
        ),
        *(
            f"--client-ca-file={credentials.ca}",
            "--service-account-issuer=https://kubernetes.default.svc",
        ),
        *(
            f"--service-account-key-file={account_key}",
            f"--service-account-signing-key-file={account_key}",
        ),
        *(
            f"--kubelet-client-certificate={kubelet_certificate}",
            f"--kubelet-client-key={kubelet_key}",
        ),
        # exec, logs and port-forward look for the node by its name otherwise, which nothing
        # resolves
        "--kubelet-preferred-address-types=InternalIP",
        *("--authorization-mode=Node,RBAC", "--allow-privileged", "--profiling=false"),
    ]


def _kubelet(cluster: Cluster, credentials: Credentials) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(credentials.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.control_group}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(cluster.config / "resolv.conf"),
        # The machine's disk is shared with others: never evict a pod or drop an image that cannot
        # be pulled again.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        "serializeImagePulls": False,
    }


def _proxy(kubeconfig: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "mode": "iptables",
        "clusterCIDR": POD_RANGE,
        # limits of the whole machine, which are not ours to set
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def _network() -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": POD_RANGE}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {
        "cniVersion": "0.4.0",
        "name": "rig",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }
