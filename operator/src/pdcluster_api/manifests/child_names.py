"""Names of the children that pods take their identity and certificates from.

They are unusual ones: a ServiceAccount `chat` or a Secret `chat-tls` beside an
application `chat` mostly has another owner.
"""

from dataclasses import dataclass


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
    return ChildNames(f"{cluster}-pdc", f"{cluster}-pdc-ca", f"{cluster}-pdc-tls")


def policy_name(cluster: str) -> str:
    """The NetworkPolicy of the workers."""
    return f"{cluster}-pdc"


def etcd_policy_name(cluster: str) -> str:
    """The NetworkPolicy of the managed etcd."""
    return f"{cluster}-pdc-etcd"
