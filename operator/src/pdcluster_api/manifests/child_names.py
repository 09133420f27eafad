"""Names of the children that pods take their identity and certificates from.

They are unusual ones: a ServiceAccount `chat` or a Secret `chat-tls` beside an
application `chat` mostly has another owner.  Workloads that an older operator
has recorded go on with the usual names that they were made with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TLS_VOLUME = "tls"


@dataclass(frozen=True)
class ChildNames:
    """Names of one set of children.

    service_account: of the pods
    authority:       Secret with the CA and its key
    certificates:    Secret that workers mount
    """

    service_account: str
    authority: str
    certificates: str


def child_names(cluster: str) -> ChildNames:
    """The names of everything that is made now."""
    return ChildNames(f"{cluster}-pdc", f"{cluster}-pdc-ca", f"{cluster}-pdc-tls")


def older_names(cluster: str) -> ChildNames:
    """The names that workloads recorded by an older operator go by, for as long as they run."""
    return ChildNames(cluster, f"{cluster}-ca", f"{cluster}-tls")


def policy_name(cluster: str) -> str:
    """The NetworkPolicy of the workers."""
    return f"{cluster}-pdc"


def etcd_policy_name(cluster: str) -> str:
    """The NetworkPolicy of the managed etcd."""
    return f"{cluster}-pdc-etcd"


def mounts(stateful_set: Mapping[str, Any], secret: str) -> bool:
    """True if the workers of a StatefulSet's spec have their certificates from a Secret."""
    volumes = _pod(stateful_set).get("volumes") or ()
    return any(
        each.get("name") == TLS_VOLUME and (each.get("secret") or {}).get("secretName") == secret
        for each in volumes
    )


def runs_as(stateful_set: Mapping[str, Any], service_account: str) -> bool:
    """True if the pods of a StatefulSet's spec run as a ServiceAccount."""
    return bool(_pod(stateful_set).get("serviceAccountName") == service_account)


def _pod(stateful_set: Mapping[str, Any]) -> Mapping[str, Any]:
    pod: Mapping[str, Any] = (stateful_set.get("template") or {}).get("spec") or {}
    return pod
