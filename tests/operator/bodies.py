"""Bodies as the API server sends them, as small as the tests need them."""

from typing import Any

from pdcluster_schema.labels import cluster_labels

Body = dict[str, Any]
NAMESPACE, NAME, UID = "default", "chat", "uid-of-chat"


def cluster(version: int = 1, *, uid: str = UID, **parts: Any) -> Body:
    """A PDCluster."""
    metadata = {
        "name": NAME,
        "namespace": NAMESPACE,
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
    }
    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": metadata,
        **parts,
    }


def child(
    kind: str, name: str, version: int = 1, *, uid: str = "", owner: str = UID, **parts: Any
) -> Body:
    """A child; labels and other metadata may be given in `metadata`."""
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        "labels": cluster_labels(NAME, "ingress"),
        "ownerReferences": [{"kind": "PDCluster", "name": NAME, "uid": owner, "controller": True}],
        **parts.pop("metadata", {}),
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **parts}
