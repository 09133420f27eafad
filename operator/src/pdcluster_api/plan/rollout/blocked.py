"""Names that a roll out waits for: another owner's object has one that workers need.

Pure.  Only what a worker uses, or what leads clients to it, counts: without a
scaler or a budget workers start and serve all the same.
"""

from collections.abc import Iterable

from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_schema.conditions import NAME_TAKEN

_NEEDED = frozenset(
    {
        "ServiceAccount",
        "Secret",
        "ConfigMap",
        "ControllerRevision",
        "NetworkPolicy",
        "Deployment",
        "StatefulSet",
        "Service",
    }
)


def is_blocked(failures: Iterable[WriteFailure], cluster: str) -> bool:
    """True if a name is taken of an object that workers, their etcd or their clients need.

    cluster: name of the PDCluster

    >>> is_blocked([WriteFailure("Secret chat-pdc-tls", NAME_TAKEN, "exists")], "chat")
    True
    >>> is_blocked([WriteFailure("PodDisruptionBudget chat", NAME_TAKEN, "exists")], "chat")
    False
    """
    # Workers find each other by their IPs, not by the names of their headless Service.
    conflicting = [failure.object for failure in failures if failure.reason == NAME_TAKEN]
    return any(
        each.partition(" ")[0] in _NEEDED and each != f"Service {cluster}-workers"
        for each in conflicting
    )
