"""Settings of the operator process, from the environment, checked before anything starts; and its
logs on stderr.
"""

import logging
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pdcluster_api.errors import StartError
from pdcluster_schema.log_lines import FORMATTERS

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)
_PREFIX = "PDCLUSTER_"
_DNS_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
)
_BOOLEANS = {"true": True, "false": False}
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
_FORMATS = {name: name for name in FORMATTERS}
_POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Settings:
    worker_image: str  # of clusters that name none; kept for the life of a revision
    etcd_image: str  # of a managed etcd that names none
    identity: str  # holder of the Lease: unique among the replicas
    namespace: str  # where the Lease is, and from where workers' etcd is asked
    server_image: str = ""  # likewise, of those with a stock engine; empty = worker_image
    # of the Lease that its replicas share, and of no other installation in the namespace
    lease_name: str = "pdcluster-operator"
    cluster_domain: str = "cluster.local"  # in which the members of a managed etcd have their names
    watch_namespaces: tuple[str, ...] = ()  # where PDClusters are served; empty = everywhere
    watch_silence_seconds: float = 70.0  # silence after which a watch is opened again
    resync_seconds: float = 300.0  # how often everything is listed and looked at again
    # PDClusters worked on at once at most: another is begun only beside one that writes no objects,
    # or waits
    concurrency: int = 4
    http_port: int = 8080  # of probes and metrics; 0 = any, for tests
    log_level: int = logging.INFO
    log_format: str = "text"
    leader_election: bool = True
    delete_lost_pods: bool = False  # those of nodes that the API server has given up
    # path to reach the API server from outside of a pod; None = as its ServiceAccount
    kubeconfig: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Raises StartError (exit code 2) with every variable that is wrong."""
        faults: list[str] = []

        def required(name: str, expected: str) -> str:
            value = environment.get(_PREFIX + name, "")
            if not value:
                faults.append(f"{_PREFIX}{name} is not set: give it {expected}")
            return value

        def read(name: str, default: str, parse: Callable[[str], Value], expected: str) -> Value:
            text = environment.get(_PREFIX + name) or default
            try:
                return parse(text)
            except ValueError:
                faults.append(f"{_PREFIX}{name} is {text!r}: it must be {expected}")
                return parse(default)

        worker_image = "the image of workers, as in registry/pdcluster-worker:0.1.0"
        lease_name = "a name of lower-case letters, digits, '-' and '.'"
        namespaces = environment.get(f"{_PREFIX}WATCH_NAMESPACES", "").split(",")
        seconds, count = _number(float, 1, 86400), _number(int, 1, 64)
        settings = cls(
            worker_image=required("WORKER_IMAGE", worker_image),
            server_image=environment.get(f"{_PREFIX}SERVER_IMAGE", ""),
            etcd_image=required(
                "ETCD_IMAGE", "the image of a managed etcd, as in registry/etcd:3.6.6"
            ),
            identity=environment.get("POD_NAME") or socket.gethostname(),
            namespace=environment.get("POD_NAMESPACE") or _own_namespace(),
            lease_name=read("LEASE_NAME", cls.lease_name, _dns_name, lease_name),
            cluster_domain=read(
                "CLUSTER_DOMAIN", cls.cluster_domain, _dns_name, "a DNS domain, as in cluster.local"
            ),
            watch_namespaces=tuple(name for each in namespaces if (name := each.strip())),
            watch_silence_seconds=read(
                "WATCH_SILENCE_SECONDS", "70", _number(float, 5, 600), "seconds from 5 to 600"
            ),
            resync_seconds=read("RESYNC_SECONDS", "300", seconds, "seconds from 1 to 86400"),
            concurrency=read("CONCURRENCY", "4", count, "a whole number from 1 to 64"),
            http_port=read(
                "HTTP_PORT", "8080", _number(int, 0, 65535), "a port from 0 (any) to 65535"
            ),
            log_level=read("LOG_LEVEL", "info", _one_of(_LEVELS), "debug, info, warning or error"),
            log_format=read("LOG_FORMAT", "text", _one_of(_FORMATS), "text or json"),
            leader_election=read("LEADER_ELECTION", "true", _one_of(_BOOLEANS), "true or false"),
            delete_lost_pods=read("DELETE_LOST_PODS", "false", _one_of(_BOOLEANS), "true or false"),
            kubeconfig=_kubeconfig(environment),
        )
        if faults:
            raise StartError("\n".join(faults), exit_code=2)
        return settings


def _number(kind: Callable[[str], Number], least: float, most: float) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = kind(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def _dns_name(text: str) -> str:
    if _DNS_NAME.fullmatch(text) is None:
        raise ValueError(text)
    return text


def _one_of(choices: Mapping[str, Value]) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        if text.lower() not in choices:
            raise ValueError(text)
        return choices[text.lower()]

    return parse


def _kubeconfig(environment: Mapping[str, str]) -> Path | None:
    """Inside a pod the ServiceAccount counts, whatever else is set."""
    if "KUBERNETES_SERVICE_HOST" in environment or not environment.get("KUBECONFIG"):
        return None
    return Path(environment["KUBECONFIG"])


def _own_namespace() -> str:
    try:
        return _POD_NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"


def start_logging(level: int, log_format: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format])
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    for name in ("kopf", "aiohttp"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
