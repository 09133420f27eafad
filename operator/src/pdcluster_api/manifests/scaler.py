"""The PDPoolScaler of a pool, as it is first made; its spec then belongs to its writers."""

from pdcluster_api.manifests.objects import OWNER_API_VERSION, Manifest, Owner, new_object
from pdcluster_schema.labels import SEEN_REPLICAS, pool_labels

KIND = "PDPoolScaler"


def render_scaler(owner: Owner, role: str, pool: str, replicas: int, seen: int) -> Manifest:
    """The /scale of one pool.

    replicas: what it starts with: the live size where there is one, else the pool's `replicas`
    seen:     the pool's `replicas`, kept beside it so that later only another value is a request
    """
    return new_object(
        f"{OWNER_API_VERSION}/{KIND}",
        f"{owner.name}-{role}-{pool}",
        owner,
        pool_labels(owner.name, role, pool),
        annotations={SEEN_REPLICAS: str(seen)},
        spec={"cluster": owner.name, "role": role, "pool": pool, "replicas": replicas},
    )
