"""The command lines of the cluster's programs and the configuration files that they read; nothing
is started here.

Paths are those inside the box (see `box`), where /run and /var/lib/* are the
cluster's own.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.rig.paths import CACHE, IMAGES, Cluster
from tests.apiserver.credentials import SERVICE_ADDRESS, Credentials

POD_RANGE = "10.244.0.0/16"  # of all nodes
API_PORT = 6443
API_URL = f"https://127.0.0.1:{API_PORT}"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PROXY = "system:kube-proxy"

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
class Node:
    name: str
    address: str
    pod_range: str


FIRST = Node("rig", "172.30.0.1", "10.244.0.0/24")
SECOND = Node("rig-2", "172.30.0.2", "10.244.1.0/24")


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
    users = {
        "admin": ("admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager",),
        "scheduler": ("system:kube-scheduler",),
        "proxy": (PROXY,),
        "dns": ("dns", "system:masters"),
        **{node.name: (f"system:node:{node.name}", "system:nodes") for node in (FIRST, SECOND)},
    }
    kubeconfigs = {
        name: str(credentials.kubeconfig(API_URL, *user)) for name, user in users.items()
    }
    control_plane = _control_plane(credentials, kubeconfigs)
    dns = _program("coredns", f"-conf={cluster.config / 'Corefile'}")
    write_node(cluster, FIRST, cluster.pki, before=control_plane, after=[dns])
    (cluster.config / "Corefile").write_text(_COREDNS % kubeconfigs["dns"])
    return credentials.kubeconfig(api_url, "administrator", "system:masters")


def write_node(
    cluster: Cluster,
    node: Node,
    pki: Path,
    *,
    before: Iterable[Component] = (),
    after: Iterable[Component] = (),
) -> None:
    """Write the files of a node into its folder, and its components with others around them."""
    config = cluster.config
    config.mkdir(parents=True)
    components = [*before, *_node(config, node, pki), *after]
    files = {
        "containerd.toml": _CONTAINERD % (config / "cni"),
        "cni/10-bridge.conflist": json.dumps(_network(node)),
        "resolv.conf": f"nameserver {FIRST.address}\n",
        "kubelet.yaml": yaml.safe_dump(_kubelet(cluster, pki / "ca.pem")),
        "proxy.yaml": yaml.safe_dump(_proxy(_kubeconfig(pki, PROXY))),
        "components.json": json.dumps([each.__dict__ for each in components], indent=2),
    }
    for name, text in files.items():
        path = config / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _kubeconfig(pki: Path, user: str) -> str:
    return str(pki / f"{user.replace(':', '-')}.kubeconfig")


def _program(name: str, *flags: str, ready: int | str | None = None) -> Component:
    command = (str(CACHE.kubernetes / name), *flags)
    return Component(name, command, {"GOMEMLIMIT": "400MiB"}, ready)


def _control_plane(credentials: Credentials, kubeconfigs: Mapping[str, str]) -> list[Component]:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        _program(
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
        _program("kube-apiserver", *_apiserver_flags(credentials), ready=API_PORT),
        _program(
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
        _program(
            "kube-scheduler",
            f"--kubeconfig={kubeconfigs['scheduler']}",
            "--leader-elect=false",
            "--profiling=false",
        ),
    ]


def _node(config: Path, node: Node, pki: Path) -> list[Component]:
    return [
        Component(
            "containerd",
            ("containerd", "--config", str(config / "containerd.toml")),
            {},
            CONTAINERD_SOCKET,
        ),
        _program(
            "kubelet",
            *(
                f"--kubeconfig={_kubeconfig(pki, f'system:node:{node.name}')}",
                f"--config={config / 'kubelet.yaml'}",
                f"--hostname-override={node.name}",
            ),
            "--cert-dir=/var/lib/kubelet/pki",
        ),
        _program(
            "kube-proxy", f"--config={config / 'proxy.yaml'}", f"--hostname-override={node.name}"
        ),
    ]


def _apiserver_flags(credentials: Credentials) -> list[str]:
    certificate, key = credentials.serving()
    kubelet_certificate, kubelet_key = credentials.client("apiserver-of-kubelet", "system:masters")
    account_key = credentials.service_account_key()
    return [
        *(
            "--etcd-servers=http://127.0.0.1:2379",
            f"--secure-port={API_PORT}",
            f"--advertise-address={FIRST.address}",
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


def _kubelet(cluster: Cluster, ca: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.control_group}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [FIRST.address],
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


def _network(node: Node) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pod_range}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {
        "cniVersion": "0.4.0",
        "name": "rig",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }
