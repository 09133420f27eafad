"""Every label, annotation and name by which the operator knows its objects again."""

GROUP = "pdcluster.io"
FIELD_MANAGER = "pdcluster-operator"

CLUSTER = f"{GROUP}/cluster"
ROLE = f"{GROUP}/role"
POOL = f"{GROUP}/pool"
REVISION = f"{GROUP}/revision"
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Label of a snapshot: a hash over what the pods of its revision are made of, however a spec writes
it; of routers and pickers over what their own pods are made of.
"""
PAIR_HASH = f"{GROUP}/pair-hash"
"""Label of a snapshot: a hash over what workers of other roles have to have in common with its."""
ROLE_HASH = f"{GROUP}/role-hash"
"""Label of a snapshot: a hash over all that the pods of its role are made of."""
RETIRED = f"{GROUP}/retired"
"""Label of a snapshot, `true` while it is kept to go back to, and no StatefulSet is made of it."""
TEMPLATE = f"{GROUP}/template"
"""Label of a workload of which the role has followed a change of its own; others have none."""

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
ETCD = "etcd"

SEEN_REPLICAS = f"{GROUP}/seen-replicas"
"""Annotation of a scaler: the pool's `replicas` that was last taken over; only another value is a
request.
"""

GPU = f"{GROUP}/gpu"
"""Annotation of a worker pod: the type of accelerator that it was made for; its record may go
before the last pod has ended.

An annotation, since a type may have a name that no label takes."""

GPUS_PER_REPLICA = f"{GROUP}/gpus-per-replica"
"""Annotation of a worker pod: the number of its worker's accelerators."""

WORKER = f"{GROUP}/worker"
"""Label of the pods and StatefulSets of a worker of several pods: the name of the worker, which is
that of its leader's StatefulSet.
"""

PODS_PER_REPLICA = f"{GROUP}/pods-per-replica"
"""Annotation of the same: the number of its pods."""

GROUP_RESTART = f"{GROUP}/group-restart"
"""Annotation of the StatefulSets of a worker of several pods: its last restart as a whole."""

GROUP_PODS = f"{GROUP}/group-pods"
"""Annotation of the same: since when the worker serves, and its pods then, by the start of their
uids.
"""

FOLLOWER_OF = {role: f"{role}-follower" for role in ("prefill", "decode", "mixed")}
"""Value of the label ROLE of pods that compute for their worker's leader, and that no client
reaches.
"""

ROTATE_CA = f"{GROUP}/rotate-ca"
"""Annotation of a PDCluster: any new value asks for a new certificate authority."""

VERIFY = f"{GROUP}/verify"
"""Annotation of a PDCluster: any new value asks for a verification of its KV transfers, even while
workers are busy.
"""

ROLLOUT = f"{GROUP}/rollout"
"""Annotation of a PDCluster, a command to its roll outs: `pause`, `resume TIME` or `undo
GENERATION`; the last two name what they are meant for, and do nothing to a later one.
"""

OBSERVED_ROTATION = f"{GROUP}/observed-rotate-ca"
"""Annotation of the authority's Secret: the value of ROTATE_CA that was last acted on."""

CERTIFICATES_CHANGED = f"{GROUP}/certificates-changed"
"""Annotation of the Secret that workers mount: time of the last change of its files."""

APPLIED = f"{GROUP}/applied"
"""Annotation of a child: a digest of the manifest that was last applied; another one is a reason to
apply again.
"""


def cluster_labels(cluster: str, component: str) -> dict[str, str]:
    """Labels of every object of a cluster.  component: prefill, decode, mixed, router, etcd, or
    ingress for what all share.
    """
    return {
        CLUSTER: cluster,
        MANAGED_BY: FIELD_MANAGER,
        "app.kubernetes.io/name": "pdcluster",
        "app.kubernetes.io/instance": cluster,
        COMPONENT: component,
        "app.kubernetes.io/part-of": "pdcluster",
    }


def pool_labels(cluster: str, role: str, pool: str) -> dict[str, str]:
    """Labels of what belongs to one pool, whatever its revision."""
    return {**cluster_labels(cluster, role), ROLE: role, POOL: pool}


def workload_labels(
    cluster: str, role: str, pool: str, revision: str, template: str = ""
) -> dict[str, str]:
    """Labels of a StatefulSet, its pods, its record and its engine file."""
    own = {TEMPLATE: template} if template else {}
    return {**pool_labels(cluster, role, pool), REVISION: revision, **own}
