"""The revision: a short name for everything that an engine file is made of.

Two specs with one revision have the same engine files, so their workers may
talk; policy, replicas and the service are not part of it.  Workers of another
revision live under another etcd prefix and never meet.
"""

import hashlib
import json

from pdcluster_operator.api.names import REVISION_LENGTH
from pdcluster_operator.api.pdcluster import PDClusterSpec


def revision_of(spec: PDClusterSpec) -> str:
    """First hexadecimal digits of a hash over model, discovery, and each role's engine and pools (by accelerator, not size)."""
    relevant = {
        "model": spec.model.model_dump(),
        "discovery": spec.discovery.model_dump(),
        "roles": {
            name: {
                "engine": spec.engine_of(name).model_dump(),
                "pools": {pool.name: [pool.gpu, pool.gpus_per_replica] for pool in role.pools},
            }
            for name, role in spec.roles.present().items()
        },
    }
    canonical = json.dumps(relevant, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:REVISION_LENGTH]
